//! How long a crew takes for parts that last so long each.

use counterpoint_exec::selftest::Extent;

use super::super::part::{Machine, Part, SLOTS, parts};
use super::Crew;
use crate::arguments::{Device, Group};

/// Seconds of all shares of a group together, without what beginning a process takes: on two H200s with 32 cores, beside other jobs
/// on the same host, from an empty cache of kernels.
fn seconds(group: Group, gpus: usize) -> f64 {
    use Group as G;
    match group {
        G::Kernels => 35.0,
        G::PortableKernels => 25.0,
        G::LongSequence => 40.0,
        // Beside the portable kernels, which have the same references.
        G::Attention => 75.0,
        G::PortableAttention | G::ProcessDisagreement => 0.0,
        G::Linear => 31.0,
        G::Gemm => 9.0,
        G::Meetings | G::Signals => 9.0,
        G::Fused => 1.0,
        G::NvlinkSignalled => 2.6,
        G::NcclFaults => 50.0,
        G::NvlinkFaults | G::CopyEngineFaults => 12.0,
        G::ProcessBits if gpus > 1 => 23.0,
        G::ProcessBits => 9.3,
        G::ProcessLayers if gpus > 1 => 12.0,
        G::ProcessStops => 9.1,
        G::ProcessCrossing => 6.3,
        G::ProcessMemory => 12.0,
        G::NcclLinear => 20.0,
        G::NcclSignalled => 10.0,
        G::NcclCollectives => 8.0,
        G::NcclSteps | G::NvlinkSteps | G::NcclExhaustion => 6.0,
        G::NvlinkLinear | G::CopyEngineLinear => 7.0,
        G::Cpu | G::CpuLinear | G::Tcp | G::Graphs | G::Isolation => 1.0,
        G::Guard
        | G::Collectives
        | G::GpusAttention
        | G::NvlinkCollectives
        | G::SharedCollectives
        | G::CopyEngineCollectives
        | G::EngineCollectives
        | G::CopyEngineSteps
        | G::CopyEngineSignalled
        | G::NvlinkRepeats
        | G::CopyEngineRepeats
        | G::NcclRepeats
        | G::NvlinkExhaustion
        | G::CopyEngineExhaustion
        | G::ProcessLayers
        | G::ProcessDeaths
        | G::ProcessLateDeaths
        | G::ProcessBitsAfter
        | G::CompiledKernels => 4.0,
    }
}

/// Of a part: what its groups take, and what beginning a process does.
fn part_seconds(part: &Part, gpus: usize) -> f64 {
    const BEGINNING: f64 = 1.5;
    const MANY: usize = 10_000;
    let share = part.share.count(MANY) as f64 / MANY as f64;
    BEGINNING + share * part.groups.iter().map(|group| seconds(*group, gpus)).sum::<f64>()
}

/// When the last part ends.
fn makespan(gpus: usize, cores: usize) -> f64 {
    let machine = Machine { gpus, hopper: true, cores };
    let waiting = parts(Device::Cuda, machine, Extent::Full, |_| true);
    let mut crew = Crew { waiting, busy: Vec::new(), free: vec![SLOTS; gpus] };
    let mut running: Vec<(f64, Part, Vec<usize>)> = Vec::new();
    let mut now = 0.0;
    loop {
        while let Some((part, gpus_of_part)) = crew.next() {
            running.push((now + part_seconds(&part, gpus), part, gpus_of_part));
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

#[test]
fn two_minutes_are_enough() {
    for (gpus, cores) in [(1, 32), (2, 32), (4, 64)] {
        let seconds = makespan(gpus, cores);
        assert!(seconds < 120.0, "{gpus} GPUs: {seconds:.0} s");
    }
}
