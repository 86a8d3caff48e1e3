//! One process of a selftest: the groups that it was given, on the GPUs that it sees.

use std::cell::Cell;
use std::io::{self, Read};
use std::thread;
use std::time::Instant;

use crate::gpu::{
    CudaSubject, selftest_cache, selftest_callers, selftest_exhaustion, selftest_faults, selftest_fused,
    selftest_gemm, selftest_graphs, selftest_grouped, selftest_guard, selftest_isolation,
    selftest_library_sums, selftest_links, selftest_long, selftest_neighbours, selftest_normalised,
    selftest_repeats, selftest_signalled_products, selftest_signals, selftest_signals_in_graphs,
    selftest_step_graphs,
};
use counterpoint_console::{self as console, CliError, Schema, arguments::Device as Examinee, interrupt};
use counterpoint_cuda::{CudaError, Device, EngineUse, NcclSettings, NcclSums, TransportKind};
use counterpoint_exec::{Machine, TcpLoopback};
use counterpoint_reference::selftest::{
    CpuSubject, Extent, SelfCheck, Share, Subject, selftest_attention, selftest_collectives,
    selftest_experts, selftest_linear, selftest_rms_norm,
};

use super::cannot_begin::CannotBegin;
use super::hostile::Hostile;
use super::ledger::{Examined, GroupChecks, Heard};
use super::processes::Bench;
use super::worker::Step;
use crate::arguments::SelftestArguments;
use crate::group::Group;

/// Examines the groups of the arguments and prints what was found as one JSON document. Ends when standard input does: whoever
/// started it is gone then.
pub(super) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    thread::Builder::new()
        .name("parent".to_owned())
        .spawn(|| {
            // Whatever ends it, an error too.
            let _ = io::stdin().lock().read_to_end(&mut Vec::new());
            interrupt::end(1);
        })
        .map_err(|error| CliError::Threads { threads: 1, reason: error.to_string() })?;
    let extent = if arguments.quick { Extent::Quick } else { Extent::Full };
    // The CPU is always examined, briefly where a GPU is what was asked for.
    let on_cpu = if arguments.device == Examinee::Cpu { extent } else { Extent::Quick };
    let calls = match (arguments.stress, extent) {
        (true, _) => Calls::STRESS,
        (false, Extent::Full) => Calls::FULL,
        (false, Extent::Quick) => Calls::QUICK,
    };
    let SelftestArguments { share, patience, .. } = *arguments;
    let examiner =
        Examiner { extent, on_cpu, calls, share, patience, began: Instant::now(), at: Cell::default() };
    let mut groups = Vec::new();
    let mut rest = arguments.groups.as_slice();
    while let Some((&group, others)) = rest.split_first() {
        // References are computed once for both families of kernels.
        let both = group == Group::Attention && others.first() == Some(&Group::PortableAttention);
        rest = if both { &others[1..] } else { others };
        groups.extend(if both { examiner.both_families() } else { vec![examiner.examine(group)] });
    }
    console::print_json(Schema::SelftestPart, &Examined { groups })
}

struct Examiner {
    extent: Extent,
    on_cpu: Extent,
    calls: Calls,
    share: Share,
    /// How many times as long jobs of processes may take.
    patience: u32,
    began: Instant,
    /// The group that is being examined, and the checks that were made so far.
    at: Cell<(String, Heard)>,
}

/// How often what waits for other ranks is called.
#[derive(Clone, Copy)]
struct Calls {
    /// Device-side barriers, in each direction.
    barriers: u32,
    /// Products whose tiles are read as they are signalled.
    signals: u32,
    /// Each collective with its product, in each shape and way.
    products: usize,
    /// Each group collective.
    collectives: usize,
    /// Rounds with kernels of another library.
    neighbours: usize,
}

impl Calls {
    const QUICK: Self =
        Self { barriers: 50_000, signals: 1000, products: 100, collectives: 100, neighbours: 100 };
    const FULL: Self =
        Self { barriers: 500_000, signals: 8000, products: 2_000, collectives: 2_000, neighbours: 1_000 };
    /// More than a million calls in which computation and communication overlap, 800,000 of them products on two GPUs and more.
    const STRESS: Self = Self {
        barriers: 2_000_000,
        signals: 50_000,
        products: 25_000,
        collectives: 40_000,
        neighbours: 10_000,
    };
}

type Checks = Result<Vec<SelfCheck>, CannotBegin>;

impl Examiner {
    fn examine(&self, group: Group) -> GroupChecks {
        self.begin(group);
        let began = self.began.elapsed();
        let checks = self.checks(group).unwrap_or_else(|reason| {
            vec![SelfCheck::failed("its beginning".to_owned(), 0, reason.to_string())]
        });
        GroupChecks::of(group, began, self.began.elapsed() - began, checks)
    }

    fn both_families(&self) -> Vec<GroupChecks> {
        self.begin(Group::Attention);
        let began = self.began.elapsed();
        let groups = [Group::Attention, Group::PortableAttention];
        let found = || -> Result<_, CannotBegin> {
            let native = CudaSubject::open()?;
            let portable = native.portable()?.ok_or(CannotBegin::OneFamily)?;
            Ok(selftest_attention(&[&native, &portable], self.extent, self.share, |check, _| {
                self.heard(check)
            }))
        };
        let found = found().unwrap_or_else(|reason| {
            let failed = SelfCheck::failed("its beginning".to_owned(), 0, reason.to_string());
            vec![vec![failed]; groups.len()]
        });
        let took = self.began.elapsed() - began;
        groups
            .into_iter()
            .zip(found)
            .map(|(group, checks)| GroupChecks::of(group, began, took, checks))
            .collect()
    }

    fn checks(&self, group: Group) -> Checks {
        use TransportKind::{CopyEngine, Nvlink};
        const NCCL: TransportKind = TransportKind::NCCL;
        let Self { extent, on_cpu, calls, .. } = *self;
        match group {
            Group::Cpu => Ok(self.attention(&CpuSubject, on_cpu)),
            Group::CpuLinear => {
                let mut checks = self.linear(&CpuSubject, on_cpu, 4);
                checks.extend(self.rms_norm(&CpuSubject, on_cpu));
                Ok(checks)
            }
            Group::Tcp => self.collectives(&TcpLoopback::default(), on_cpu, 8),
            Group::Hostile => Ok(Hostile::new(self.patience)?.checks(|check| self.heard(check))),
            Group::Guard => Ok(selftest_guard(CudaSubject::open()?.gpu())?),
            Group::Callers => Ok(selftest_callers(CudaSubject::open()?.machine())?),
            Group::Kernels => Ok(CudaSubject::open()?.load_all()),
            Group::PortableKernels => Ok(portable()?.load_all()),
            Group::Attention => Ok(self.attention(&CudaSubject::open()?, extent)),
            Group::PortableAttention => Ok(self.attention(&portable()?, extent)),
            Group::LongSequence => Ok(selftest_long(CudaSubject::open()?.machine())),
            Group::Collectives => self.collectives(CudaSubject::open()?.machine(), extent, 4),
            Group::RmsNorm => Ok(self.rms_norm(&CudaSubject::open()?, extent)),
            Group::Gemm => self.gemm(CudaSubject::open()?.gpu()),
            Group::PortableGemm => self.gemm(portable()?.gpu()),
            Group::Linear => Ok(self.linear(&CudaSubject::open()?, extent, 4)),
            Group::PortableLinear => Ok(self.linear(&portable()?, extent, 4)),
            Group::LibraryLinear => Ok(match CudaSubject::open()?.with_cublaslt() {
                Ok(subject) => self.linear(&subject, Extent::Quick, 4),
                // Nobody needs it.
                Err(CudaError::NoCublasLt { .. }) => Vec::new(),
                Err(error) => return Err(error.into()),
            }),
            Group::Graphs => {
                Ok(selftest_graphs(CudaSubject::open()?.machine(), extent, |check, _| self.heard(check)))
            }
            Group::CompiledKernels => Ok(selftest_cache(CudaSubject::open()?.gpu())?),
            Group::Barriers => Ok(selftest_links(over_gpus(Nvlink)?.machine().devices(), calls.barriers)?),
            Group::Neighbours => Ok(selftest_neighbours(over_gpus(Nvlink)?.machine(), calls.neighbours)?),
            Group::Signals => Ok(selftest_signals(over_gpus(Nvlink)?.machine().devices(), calls.signals)?),
            Group::ProcessBits => self.processes(|bench| bench.bits(extent)),
            Group::ProcessNodes => self.processes(Bench::inter_node),
            Group::ProcessLayers => self.processes(Bench::layers),
            Group::ProcessDisagreement => self.processes(Bench::disagreement),
            Group::ProcessDeaths => self.processes(Bench::deaths),
            Group::ProcessLateDeaths => self.processes(Bench::late_deaths),
            Group::ProcessStops => self.processes(Bench::stops),
            Group::ProcessMemory => Ok(Bench::new(self.patience)?.exhaustion(&Device::open(1)?)?),
            Group::ProcessBitsAfter => self.processes(|bench| bench.bits(Extent::Quick)),
            Group::NvlinkFaults => self.faults(Nvlink),
            Group::CopyEngineFaults => self.faults(CopyEngine),
            Group::NcclFaults => self.faults(NCCL),
            Group::Isolation => Ok(selftest_isolation(over_gpus(Nvlink)?.machine())?),
            Group::NvlinkExhaustion => Ok(selftest_exhaustion(over_gpus(Nvlink)?.machine())?),
            Group::CopyEngineExhaustion => Ok(selftest_exhaustion(over_gpus(CopyEngine)?.machine())?),
            Group::NcclExhaustion => Ok(selftest_exhaustion(over_gpus(NCCL)?.machine())?),
            // Its problems are those of one GPU; what is new is who has which rank.
            Group::GpusAttention => Ok(self.attention(&over_gpus(Nvlink)?, Extent::Quick)),
            Group::NvlinkCollectives => self.collectives_over(Nvlink, 1),
            Group::SharedCollectives => self.collectives_over(Nvlink, 2),
            Group::CopyEngineCollectives => self.collectives_over(CopyEngine, 2),
            Group::NcclCollectives => self.collectives_over(NCCL, 1),
            Group::EngineCollectives => self.engine_collectives(),
            Group::NvlinkSteps => Ok(selftest_step_graphs(over_gpus(Nvlink)?.machine(), extent)?),
            Group::CopyEngineSteps => Ok(selftest_step_graphs(over_gpus(CopyEngine)?.machine(), extent)?),
            Group::NcclSteps => Ok(selftest_step_graphs(over_gpus(NCCL)?.machine(), extent)?),
            Group::Fused => Ok(selftest_fused(over_gpus(Nvlink)?.machine(), calls.products)?),
            Group::NvlinkSignalled => self.signalled(Nvlink),
            Group::CopyEngineSignalled => self.signalled(CopyEngine),
            Group::NcclSignalled => self.signalled(NCCL),
            Group::NvlinkLinear => self.linear_over(Nvlink, extent, 1),
            Group::CopyEngineLinear => self.linear_over(CopyEngine, extent, 2),
            Group::NcclLinear => self.linear_over(NCCL, extent, 1),
            Group::LibrarySums => library_sums(),
            Group::NvlinkRepeats => self.repeats(Nvlink),
            Group::CopyEngineRepeats => self.repeats(CopyEngine),
            Group::NcclRepeats => self.repeats(NCCL),
        }
    }

    fn attention(&self, subject: &dyn Subject, extent: Extent) -> Vec<SelfCheck> {
        selftest_attention(&[subject], extent, self.share, |check, _| self.heard(check)).remove(0)
    }

    /// Reports to whoever started this process that a check was made.
    fn heard(&self, check: &SelfCheck) {
        let (group, mut heard) = self.at.take();
        heard.checks += 1;
        heard.failed += usize::from(!check.passed);
        self.at.set((group, heard));
        self.step();
    }

    /// Reports that a group begins.
    fn begin(&self, group: Group) {
        let (_, heard) = self.at.take();
        self.at.set((group.name().to_owned(), heard));
        self.step();
    }

    fn step(&self) {
        let step = Step { step: self.at.take() };
        if let Ok(line) = serde_json::to_string(&step) {
            // Who does not read it has gone, and this process will end with it.
            let _ = console::print(&(line + "\n"));
        }
        self.at.set(step.step);
    }

    fn collectives<M: Machine>(&self, machine: &M, extent: Extent, most_ranks: usize) -> Checks {
        Ok(selftest_collectives(machine, extent, self.share, most_ranks, |check, _| self.heard(check))?)
    }

    /// With so many ranks on each GPU, at most.
    fn collectives_over(&self, transport: TransportKind, ranks_of_each: usize) -> Checks {
        let subject = over_gpus(transport)?;
        let most = ranks_of_each * subject.machine().devices().len();
        self.collectives(subject.machine(), self.extent, most)
    }

    fn engine_collectives(&self) -> Checks {
        let machine = over_gpus(TransportKind::Nvlink)?.machine().clone().with_engines(EngineUse::ALWAYS);
        self.collectives(&machine, self.extent, machine.devices().len())
    }

    fn linear(&self, subject: &dyn Subject, extent: Extent, most_ranks: usize) -> Vec<SelfCheck> {
        let mut checks =
            selftest_linear(subject, extent, self.share, most_ranks, |check, _| self.heard(check));
        checks
            .extend(selftest_experts(subject, extent, self.share, most_ranks, |check, _| self.heard(check)));
        checks
    }

    fn gemm(&self, device: &Device) -> Checks {
        let mut checks = selftest_gemm(device, self.extent, self.share, |check, _| self.heard(check))?;
        // Elsewhere each problem is a launch.
        if device.arch().is_hopper() {
            checks.extend(selftest_grouped(device, self.extent, self.share, |check| self.heard(check))?);
        }
        Ok(checks)
    }

    fn rms_norm(&self, subject: &dyn Subject, extent: Extent) -> Vec<SelfCheck> {
        selftest_rms_norm(subject, extent, self.share, |check, _| self.heard(check))
    }

    /// As [`Examiner::collectives_over`].
    fn linear_over(&self, transport: TransportKind, extent: Extent, ranks_of_each: usize) -> Checks {
        let subject = over_gpus(transport)?;
        Ok(self.linear(&subject, extent, ranks_of_each * subject.machine().devices().len()))
    }

    fn faults(&self, transport: TransportKind) -> Checks {
        Ok(selftest_faults(over_gpus(transport)?.machine(), self.extent, self.share, |check, _| {
            self.heard(check)
        })?)
    }

    fn signalled(&self, transport: TransportKind) -> Checks {
        let subject = over_gpus(transport)?;
        let mut checks = selftest_signalled_products(subject.machine(), self.calls.products)?;
        checks.extend(selftest_normalised(subject.machine())?);
        // Ranks wait for each other on the host where copy engines move their rows.
        if transport != TransportKind::CopyEngine {
            checks.extend(selftest_signals_in_graphs(subject.machine())?);
        }
        Ok(checks)
    }

    fn repeats(&self, transport: TransportKind) -> Checks {
        Ok(selftest_repeats(over_gpus(transport)?.machine(), self.calls.collectives)?)
    }

    fn processes(&self, examine: impl Fn(&Bench) -> Vec<SelfCheck>) -> Checks {
        Ok(examine(&Bench::new(self.patience)?))
    }
}

fn portable() -> Result<CudaSubject, CannotBegin> {
    CudaSubject::open()?.portable()?.ok_or(CannotBegin::NoOtherKernels)
}

fn library_sums() -> Checks {
    let settings = NcclSettings { sums: NcclSums::Library, ..NcclSettings::PLAIN };
    Ok(selftest_library_sums(&over_gpus(TransportKind::Nccl(settings))?))
}

/// All GPUs; on a single one ranks share it.
fn over_gpus(transport: TransportKind) -> Result<CudaSubject, CannotBegin> {
    Ok(CudaSubject::over_gpus(transport)?)
}
