//! `counterpoint tune gemm`.

mod found;
mod summary;
mod tuning;

use std::time::{Duration, Instant};

use counterpoint_cuda::TransportKind;
use counterpoint_exec::{CpuMachine, Machine, Repeats};
use counterpoint_plan::{
    DType, GroupSearcher, LinearDirection, LinearSpec, LinkUse, ProductStart, WaveGroups,
};
use counterpoint_schedule::{OverlapPolicy, StartOrder, WorkerShare};

use crate::arguments::{Device, RanksArguments, SearchArgument, TuneGemmArguments};
use crate::command::rank_machine::RankMachine;
use crate::console;
use crate::error::CliError;
use crate::tuned::TunedFile;
use summary::Summary;
use tuning::{TRIALS, Tuning};

/// Waves that a prediction is made with; twice as many sequences for each more would be measured.
const PREDICTED_WAVES: u32 = 16;
const MEASURED_WAVES: u32 = 6;
/// Rows of a tile of the GPU's product.
const TILE_ROWS: usize = 128;

pub(super) fn run(arguments: &TuneGemmArguments) -> Result<(), CliError> {
    let mut file = TunedFile::open(arguments.plans.as_deref())?;
    let ranks =
        RankMachine::open(arguments.ranks.device, arguments.ranks.tp_size, arguments.ranks.transport)?;
    let tp_size = tp_size(&arguments.ranks, &ranks)?;
    let policy = arguments.overlap.unwrap_or_else(|| usual_policy(&ranks, arguments.ranks.transport));
    let tunings = tunings(arguments, tp_size, policy, &ranks)?;
    console::note_development_build();
    match &ranks {
        RankMachine::Cpu(_) => {
            let machine = CpuMachine::new(policy.sm_margin(), arguments.ranks.slow_link)
                .map_err(|source| CliError::Run { source })?;
            tune(&machine, ranks.name(), &tunings, &mut file)
        }
        RankMachine::Cuda(machine) => tune(machine, ranks.name(), &tunings, &mut file),
        RankMachine::Process(_) => Err(only_threads()),
    }
}

/// What is asked for: every collective of every product.
fn tunings<'a>(
    arguments: &'a TuneGemmArguments,
    tp_size: usize,
    policy: OverlapPolicy,
    ranks: &RankMachine,
) -> Result<Vec<Tuning<'a>>, CliError> {
    let (products, flags) = match [arguments.m, arguments.n, arguments.k] {
        [Some(m), Some(n), Some(k)] => (vec![[m, n, k]], ["--k", "--n"]),
        _ => (arguments.shapes.clone(), ["--shapes"; 2]),
    };
    let dtype = dtype(&arguments.ranks);
    let cases = arguments
        .collective
        .iter()
        .flat_map(|collective| products.iter().map(move |size| (collective, size)));
    cases
        .map(|(collective, &size)| {
            let spec = collective.layer(size, dtype);
            let searcher = searcher(arguments, spec, tp_size, policy, ranks)?;
            let named = [("in_features", flags[0]), ("out_features", flags[1])];
            searcher.plan(WaveGroups::Fixed(1)).map_err(|source| CliError::of_layer(source, &named))?;
            Ok(Tuning { arguments, spec, tp_size, policy, searcher })
        })
        .collect()
}

/// Tunes one after the other. What is found is kept at once, so that who breaks off has what was found by then.
fn tune<M: Machine>(
    machine: &M,
    device: &str,
    tunings: &[Tuning<'_>],
    file: &mut TunedFile,
) -> Result<(), CliError> {
    let begun = Instant::now();
    let mut summary = Summary::default();
    for tuning in tunings {
        let found = tuning.search(machine)?;
        if let Some(kept) = found.kept(device) {
            file.keep(kept)?;
        }
        found.tell(tuning, device, file)?;
        summary.add(tuning, &found);
    }
    match tunings {
        [] | [_] => Ok(()),
        [first, ..] => summary.tell(begun.elapsed(), first.arguments.ranks.json),
    }
}

/// What lets communication run under computation on these ranks.
fn usual_policy(ranks: &RankMachine, transport: TransportKind) -> OverlapPolicy {
    let RankMachine::Cuda(machine) = ranks else { return OverlapPolicy::default() };
    // Copy engines take no multiprocessor, so nothing has to be kept free for them.
    if transport == TransportKind::CopyEngine {
        return OverlapPolicy::default();
    }
    let workers = WorkerShare::Margin(machine.worker_sharing().communication);
    OverlapPolicy { workers, ..OverlapPolicy::new(StartOrder::KernelBarrier) }
}

/// What is timed here are ranks of one process.
pub(in crate::command) fn only_threads() -> CliError {
    let message = "ranks that are processes are not timed by this command; start it without a launcher";
    CliError::Usage { message: message.to_owned() }
}

/// Ranks that were asked for, or as many as there are GPUs; at least two.
pub(in crate::command) fn tp_size(
    arguments: &RanksArguments,
    ranks: &RankMachine,
) -> Result<usize, CliError> {
    let tp_size = arguments.tp_size.unwrap_or_else(|| ranks.gpus().max(2));
    if tp_size < 2 {
        let reason = "is one rank, and nothing travels; use at least 2".to_owned();
        return Err(CliError::Flag { flag: "--tp-size", value: tp_size.to_string(), reason });
    }
    if let (Some(_), Device::Cuda) = (arguments.slow_link, arguments.device) {
        let reason = "imitates a link between CPU ranks; leave it out with --device cuda".to_owned();
        return Err(CliError::Flag { flag: "--slow-link", value: String::new(), reason });
    }
    Ok(tp_size)
}

/// The element type that was asked for, or the device's usual one.
pub(in crate::command) fn dtype(arguments: &RanksArguments) -> DType {
    arguments.dtype.unwrap_or(match arguments.device {
        Device::Cpu => DType::F32,
        Device::Cuda => DType::Bf16,
    })
}

pub(in crate::command) fn repeats(arguments: &RanksArguments) -> Repeats {
    Repeats {
        limit: arguments.limit,
        warmups: arguments.warmups as usize,
        iterations: arguments.iterations as usize,
        enough: Duration::MAX,
    }
}

fn searcher(
    arguments: &TuneGemmArguments,
    spec: LinearSpec,
    tp_size: usize,
    policy: OverlapPolicy,
    ranks: &RankMachine,
) -> Result<GroupSearcher, CliError> {
    let predicted_only = arguments.search == SearchArgument::Predictive;
    let waves = arguments.waves.unwrap_or(if predicted_only { PREDICTED_WAVES } else { MEASURED_WAVES });
    if !predicted_only && waves > 12 {
        let reason =
            format!("makes {} sequences, too many to measure each; use at most 12", 1u64 << (waves - 1));
        return Err(CliError::Flag { flag: "--waves", value: waves.to_string(), reason });
    }
    let mut wave = spec.tokens.div_ceil(tp_size).div_ceil(waves as usize);
    let takes_workers =
        arguments.ranks.transport != TransportKind::CopyEngine && policy.workers == WorkerShare::Common;
    let (mut speed_beside, mut link) = (1.0, LinkUse::Apart);
    if let RankMachine::Cuda(machine) = ranks {
        // Whole tiles of the rows of all ranks together.
        wave = wave.next_multiple_of(TILE_ROWS.div_ceil(tp_size));
        link = LinkUse::Shared;
        if takes_workers {
            let sharing = machine.worker_sharing();
            speed_beside = sharing.speed_without(sharing.communication);
        }
    }
    let starts = match policy.start {
        StartOrder::KernelBarrier => ProductStart::AfterCommunication,
        StartOrder::Signals => ProductStart::OneKernel,
        StartOrder::Sequential | StartOrder::Concurrent => ProductStart::Free,
    };
    let most_groups = arguments.most_groups as usize;
    let trials = TRIALS[1];
    let direction = LinearDirection::Forward;
    Ok(GroupSearcher { spec, tp_size, direction, wave, most_groups, trials, starts, link, speed_beside })
}
