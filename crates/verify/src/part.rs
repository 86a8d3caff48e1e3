//! What is examined together, where, and when.

use std::num::NonZeroUsize;
use std::thread;

use counterpoint_console::arguments::Device;
use counterpoint_reference::selftest::{Extent, Share};

use crate::group::Group;

/// Groups, or a share of them, that one process examines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) groups: Vec<Group>,
    pub(super) share: Share,
    pub(super) place: Place,
    pub(super) when: When,
}

impl Part {
    /// Whether it compiles all kernels of a family.
    pub(super) fn compiles(&self) -> bool {
        self.groups.iter().any(|group| matches!(group, Group::Kernels | Group::PortableKernels))
    }
}

/// What it runs on, and how many slots of each GPU it takes meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Host,
    /// One of them, the only one that its process sees.
    AnyGpu(usize),
    AllGpus(usize),
}

/// What it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    AtOnce,
    /// Until all kernels are compiled, so that nobody compiles one that another process is compiling.
    Compiled,
    /// Until everything else has ended.
    Last,
}

/// Slots of a GPU: what takes all of them runs alone.
pub(super) const SLOTS: usize = 18;
/// Of one group: each is seconds of the host before it begins, and sixteen took three times as long together as eight.
const MOST_SHARES: usize = 10;
/// What keeps the host busy only.
const NOTHING: usize = 0;
/// What mostly waits, or keeps the host busier than the GPU.
const LIGHT: usize = 1;
/// What keeps a GPU busy at times.
const USUAL: usize = 2;
/// Several processes, whose kernels wait for each other.
const JOBS: usize = 3;

/// What a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Machine {
    pub(super) gpus: usize,
    /// Whether its first GPU has kernels of its own besides the portable ones.
    pub(super) hopper: bool,
    pub(super) cores: usize,
}

impl Machine {
    /// With so many GPUs.
    pub(super) fn new(gpus: usize, hopper: bool) -> Self {
        Self { gpus, hopper, cores: thread::available_parallelism().map_or(1, NonZeroUsize::get) }
    }

    /// In how many shares a group is examined that is little work for the GPU and much for the host.
    fn shares(&self, extent: Extent) -> usize {
        match extent {
            Extent::Quick => 1,
            Extent::Full => (self.gpus.max(1) * (self.cores / 8).clamp(1, 4)).min(MOST_SHARES),
        }
    }
}

/// Everything that is examined on a device, in the order in which it should begin.
pub(super) fn parts(device: Device, machine: Machine, extent: Extent) -> Vec<Part> {
    let mut parts = vec![Part {
        groups: vec![Group::Cpu, Group::CpuLinear, Group::Tcp],
        share: Share::ALL,
        place: Place::Host,
        when: When::AtOnce,
    }];
    if device == Device::Cuda {
        on_gpus(machine, extent, &mut parts);
    }
    parts
}

/// Ranks among hostile others.
pub(super) fn hostile_parts() -> Vec<Part> {
    vec![Part { groups: vec![Group::Hostile], share: Share::ALL, place: Place::Host, when: When::AtOnce }]
}

/// Barriers and flags between the GPUs of a machine, one after the other.
pub(super) fn stress_parts(machine: Machine) -> Vec<Part> {
    let mut groups = Vec::new();
    if machine.hopper {
        groups.extend([Group::Barriers, Group::Signals]);
    }
    if machine.hopper && machine.gpus > 1 {
        groups.extend([
            Group::Fused,
            Group::NvlinkSignalled,
            Group::CopyEngineSignalled,
            Group::NcclSignalled,
        ]);
    }
    groups.extend([Group::NvlinkRepeats, Group::CopyEngineRepeats]);
    if machine.gpus > 1 {
        groups.push(Group::NcclRepeats);
    }
    let part = |group| Part {
        groups: vec![group],
        share: Share::ALL,
        place: Place::AllGpus(SLOTS),
        when: When::AtOnce,
    };
    groups.into_iter().map(part).collect()
}

/// Parts without the groups that are not `wanted`.
pub(super) fn keep(mut parts: Vec<Part>, wanted: impl Fn(Group) -> bool) -> Vec<Part> {
    for part in &mut parts {
        part.groups.retain(|group| wanted(*group));
    }
    parts.retain(|part| !part.groups.is_empty());
    parts
}

fn on_gpus(machine: Machine, extent: Extent, parts: &mut Vec<Part>) {
    use Group as G;
    let Machine { gpus, hopper, .. } = machine;
    let (several, full) = (gpus > 1, extent == Extent::Full);
    let mut add = |groups: &[Group], place, when, shares: usize, runs: bool| {
        if runs {
            let part = |share| Part { groups: groups.to_vec(), share, place, when };
            parts.extend(Share::each(shares).map(part));
        }
    };
    // Compilers keep all cores busy meanwhile and GPUs idle, but for loading what is compiled.
    add(&[G::Kernels], Place::AnyGpu(NOTHING), When::AtOnce, 1, full);
    add(&[G::PortableKernels], Place::AnyGpu(NOTHING), When::AtOnce, 1, full && hopper);
    // Kernels that wait for each other by the million are held up by everything else that runs, and hold up everyone else.
    let alone = Place::AllGpus(SLOTS);
    add(&[G::Barriers, G::Signals], alone, When::AtOnce, 1, hopper);
    let travelling = [G::Fused, G::NvlinkSignalled, G::CopyEngineSignalled];
    add(&travelling, alone, When::AtOnce, 1, several && hopper);
    // Half a minute of one thread, which makes its inputs, before the GPU has anything to do.
    add(&[G::LongSequence], Place::AnyGpu(NOTHING), When::AtOnce, 1, full);
    let [light, everywhere, jobs] = [LIGHT, USUAL, JOBS].map(Place::AllGpus);
    let shares = machine.shares(extent);
    let any = Place::AnyGpu(USUAL);
    // The longest first: many processes, which begin one after the other, and what waits for limits and connects NCCL's ranks anew.
    add(&[G::ProcessBits], jobs, When::AtOnce, 1, true);
    add(&[G::ProcessLayers], jobs, When::AtOnce, 1, true);
    add(&[G::NcclFaults], light, When::AtOnce, if full { 4 } else { 1 }, several);
    let attention: &[_] = if hopper { &[G::Attention, G::PortableAttention] } else { &[G::Attention] };
    // What wants all GPUs finds no room once shares of attention run on each of them.
    add(&[G::NcclLinear], light, When::Compiled, 2, several);
    add(&[G::NcclSignalled], light, When::Compiled, 1, several && hopper);
    add(attention, any, When::Compiled, shares, true);
    add(&[G::ProcessNodes], jobs, When::AtOnce, 1, several);
    add(&[G::NvlinkFaults], light, When::AtOnce, if full { 2 } else { 1 }, true);
    add(&[G::CopyEngineFaults], light, When::AtOnce, if full { 2 } else { 1 }, true);
    add(&[G::NcclCollectives], light, When::Compiled, 1, several);
    add(&[G::ProcessDeaths], everywhere, When::AtOnce, 1, true);
    add(&[G::ProcessLateDeaths, G::ProcessDisagreement], everywhere, When::AtOnce, 1, true);
    add(&[G::Isolation, G::NcclSteps, G::NcclRepeats], light, When::Compiled, 1, several);
    add(&[G::LibrarySums], light, When::Compiled, 1, several);
    add(&[G::Linear, G::Gemm], any, When::Compiled, shares, true);
    add(&[G::PortableLinear, G::PortableGemm], any, When::Compiled, shares, hopper);
    add(&[G::LibraryLinear], any, When::Compiled, 1, true);
    add(&[G::Guard, G::Collectives, G::Graphs], any, When::Compiled, 1, true);
    add(&[G::RmsNorm], any, When::Compiled, 1, true);
    add(&[G::Callers], any, When::Compiled, 1, true);
    add(&[G::NvlinkLinear, G::CopyEngineLinear], everywhere, When::Compiled, 2, several);
    add(&[G::NvlinkCollectives, G::SharedCollectives], everywhere, When::Compiled, 1, several);
    add(&[G::CopyEngineCollectives, G::EngineCollectives], everywhere, When::Compiled, 1, several);
    add(&[G::GpusAttention], everywhere, When::Compiled, 1, several);
    add(&[G::NvlinkSteps, G::CopyEngineSteps], everywhere, When::Compiled, 1, several);
    add(&[G::NvlinkRepeats, G::CopyEngineRepeats], everywhere, When::Compiled, 1, true);
    add(&[G::Neighbours], everywhere, When::Compiled, 1, true);
    // It needs no memory, and the others leave it the first GPU's.
    add(&[G::CompiledKernels], Place::AnyGpu(NOTHING), When::Last, 1, true);
    // Among fifty processes that begin and end, a rank of NCCL took longer to say so than its limit, by itself not (docs/limits.md).
    add(&[G::ProcessStops], everywhere, When::Last, 1, true);
    // They use up all memory.
    add(&[G::ProcessMemory], alone, When::Last, 1, several);
    let memory = [G::NvlinkExhaustion, G::CopyEngineExhaustion, G::NcclExhaustion];
    add(&memory, alone, When::Last, 1, several);
    add(&[G::ProcessBitsAfter], jobs, When::Last, 1, true);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(gpus: usize, extent: Extent) -> Vec<Part> {
        let machine = Machine { gpus, hopper: true, cores: 64 };
        parts(Device::Cuda, machine, extent)
    }

    #[test]
    fn every_group_is_examined_in_whole_shares_and_small_machines_leave_out_only_what_they_lack() {
        for (gpus, extent) in [(1, Extent::Full), (2, Extent::Full), (4, Extent::Full), (2, Extent::Quick)] {
            let parts = all(gpus, extent);
            for group in Group::ALL {
                let of_group: Vec<Share> =
                    parts.iter().filter(|part| part.groups.contains(&group)).map(|part| part.share).collect();
                for case in 0..100 {
                    let ranks_with_it = of_group.iter().filter(|share| share.takes(case)).count();
                    assert!(ranks_with_it <= 1, "{group} {case}: {ranks_with_it}");
                    let left_out = of_group.is_empty();
                    assert!(ranks_with_it == 1 || left_out, "{group} {case}");
                }
                if gpus > 1 && extent == Extent::Full && group != Group::Hostile {
                    assert!(!of_group.is_empty(), "{group}");
                }
            }
        }
    }

    #[test]
    fn stress_is_alone_on_all_gpus() {
        for gpus in [1, 2] {
            let parts = stress_parts(Machine { gpus, hopper: true, cores: 8 });
            assert_eq!(parts.len(), if gpus > 1 { 9 } else { 4 });
            assert!(parts.iter().all(|part| part.place == Place::AllGpus(SLOTS)));
        }
    }

    #[test]
    fn only_what_is_wanted_is_left() {
        let machine = Machine { gpus: 2, hopper: true, cores: 8 };
        let all = parts(Device::Cuda, machine, Extent::Full);
        let parts = keep(all, |group| group.name().contains("gemm"));
        assert_eq!(parts.len(), 4);
        let gemm =
            |part: &Part| [Group::Gemm, Group::PortableGemm].iter().any(|group| part.groups == [*group]);
        assert!(parts.iter().all(gemm));
    }

    #[test]
    fn the_cpu_needs_no_gpu() {
        let machine = Machine { gpus: 0, hopper: false, cores: 8 };
        let parts = parts(Device::Cpu, machine, Extent::Full);
        assert!(parts.iter().all(|part| part.place == Place::Host && part.when == When::AtOnce));
    }
}
