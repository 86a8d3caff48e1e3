//! How long a crew takes for parts that last so long each.

use counterpoint_console::arguments::Device;
use counterpoint_reference::selftest::Extent;

use super::super::part::{Machine, Part, SLOTS, parts};
use super::Crew;
use crate::group::Group;

/// Seconds of all shares of a group together, what beginning a process takes among them: on two H200s, concurrently with jobs on two others
/// of their host of 64 cores, from an empty cache of kernels.
fn seconds(group: Group) -> f64 {
    use Group as G;
    match group {
        G::Kernels => 34.0,
        G::PortableKernels => 19.0,
        G::LongSequence => 36.0,
        // As the portable kernels, which have the same references.
        G::Attention => 185.0,
        G::PortableAttention | G::ProcessDisagreement => 0.0,
        G::Linear => 44.0,
        G::Gemm => 34.0,
        // Not yet measured: the same problems, and no grouped ones.
        G::PortableLinear => 44.0,
        G::PortableGemm => 25.0,
        G::Barriers => 8.0,
        G::Signals => 11.0,
        G::LibraryLinear => 10.0,
        G::Fused => 12.0,
        G::NvlinkSignalled | G::CopyEngineSignalled => 5.0,
        G::NcclFaults => 146.0,
        G::NvlinkFaults | G::CopyEngineFaults => 27.0,
        G::ProcessBits => 27.0,
        G::ProcessLayers => 26.0,
        // With nothing else.
        G::ProcessStops => 10.0,
        G::ProcessNodes => 8.0,
        G::ProcessDeaths | G::ProcessLateDeaths => 9.0,
        G::ProcessMemory | G::ProcessBitsAfter => 4.0,
        G::NcclLinear => 69.0,
        // Not yet measured: few layers, whose ranks are connected once.
        G::LibrarySums => 5.0,
        G::NcclSignalled => 23.0,
        G::NcclCollectives => 21.0,
        G::Isolation => 13.0,
        G::NvlinkSteps | G::NcclSteps | G::GpusAttention => 7.0,
        G::NvlinkLinear => 25.0,
        G::CopyEngineLinear => 7.0,
        G::NvlinkCollectives
        | G::SharedCollectives
        | G::CopyEngineCollectives
        | G::EngineCollectives
        | G::Collectives => 9.0,
        G::Guard | G::CompiledKernels => 6.0,
        G::Callers => 4.0,
        // Not yet measured: a process, few kernels, inputs made on the host.
        G::RmsNorm => 4.0,
        G::Neighbours
        | G::CopyEngineSteps
        | G::NvlinkRepeats
        | G::CopyEngineRepeats
        | G::NcclRepeats
        | G::Graphs => 3.0,
        G::NvlinkExhaustion | G::CopyEngineExhaustion | G::NcclExhaustion => 2.0,
        G::Cpu | G::CpuLinear | G::Tcp | G::Hostile => 1.0,
    }
}

/// Of a part.
fn part_seconds(part: &Part) -> f64 {
    const MANY: usize = 10_000;
    let share = part.share.count(MANY) as f64 / MANY as f64;
    share * part.groups.iter().map(|group| seconds(*group)).sum::<f64>()
}

/// When the last part ends.
fn makespan(gpus: usize, cores: usize) -> f64 {
    let machine = Machine { gpus, hopper: true, cores };
    let waiting = parts(Device::Cuda, machine, Extent::Full);
    let mut crew = Crew { waiting, busy: Vec::new(), free: vec![SLOTS; gpus] };
    let mut running: Vec<(f64, Part, Vec<usize>)> = Vec::new();
    let mut now = 0.0;
    loop {
        while let Some((part, gpus_of_part)) = crew.next() {
            running.push((now + part_seconds(&part), part, gpus_of_part));
        }
        let first = (0..running.len()).min_by(|&a, &b| running[a].0.total_cmp(&running[b].0));
        let Some(first) = first else { break };
        let (end, part, gpus_of_part) = running.remove(first);
        now = end;
        crew.end(&part, &gpus_of_part);
    }
    assert!(crew.waiting.is_empty(), "{:?}", crew.waiting);
    now
}

/// Two minutes, and what is examined with nothing else.
#[test]
fn it_takes_about_two_minutes() {
    for (gpus, cores) in [(1, 64), (2, 64), (4, 64)] {
        let seconds = makespan(gpus, cores);
        assert!(seconds < 130.0, "{gpus} GPUs: {seconds:.0} s");
    }
}
