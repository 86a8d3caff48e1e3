//! `counterpoint tune gemm`.

mod found;
mod summary;
mod tuning;

use std::sync::Arc;
use std::time::{Duration, Instant};

use counterpoint_choose::{GroupSearcher, LinearMachine, LinkUse, TunedPass, TunedPlace, TunedShape};
use counterpoint_console::{
    self as console, CliError, CommandLine, UsageFault,
    arguments::Device,
    launched::{as_rank, gpus_as_threads, launch, refuse_other_sizes},
    rank_machine::RankMachine,
    tuned::{self, TunedFile},
};
use counterpoint_cost::ProblemSize;
use counterpoint_cuda::{CudaMachine, TransportKind};
use counterpoint_exec::{CpuMachine, Launch, Machine, Rendezvous, TcpMachine};
use counterpoint_measure::{Processes, Repeats};
use counterpoint_plan::{DType, LinearDirection, LinearField, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_schedule::{OverlapPolicy, WorkerShare};

use crate::arguments::{BenchTpPass, RanksArguments, SearchArgument, TuneGemmArguments};
use counterpoint_console::FlagFault;
use summary::Summary;
use tuning::{TRIALS, Tuning, Variant};

/// Waves that a prediction is made with; twice as many sequences for each more would be measured.
const PREDICTED_WAVES: u32 = 16;
const MEASURED_WAVES: u32 = 6;
/// Of which each sequence is measured.
const MOST_WAVES: u32 = 12;
/// Rows of a tile of the GPU's product.
const TILE_ROWS: usize = 128;

/// `counterpoint tune gemm`.
pub(super) fn run(arguments: &TuneGemmArguments, line: &CommandLine) -> Result<(), CliError> {
    match launch()? {
        None => with_threads(arguments),
        Some(launch) => as_rank(&launch, line, arguments.ranks.limit, |rendezvous| {
            with_processes(arguments, &launch, rendezvous)
        }),
    }
}

/// Ranks are threads, on CPUs or GPUs.
fn with_threads(arguments: &TuneGemmArguments) -> Result<(), CliError> {
    let mut file = TunedFile::open(arguments.plans.as_deref())?;
    let ranks =
        RankMachine::open(arguments.ranks.device, arguments.ranks.tp_size, arguments.ranks.transport)?;
    let tp_size = tp_size(&arguments.ranks, &ranks)?;
    let place = ranks.tuned_place(arguments.ranks.slow_link);
    match &ranks {
        RankMachine::Cpu(_) => {
            let machine = CpuMachine::new(margin(arguments), arguments.ranks.slow_link)
                .map_err(|source| CliError::Run { source })?;
            let tunings = tunings(arguments, &machine.linear(tp_size), &place, None)?;
            tune((&machine, Processes::One), &tunings, Some(&mut file))
        }
        RankMachine::Cuda(machine) => {
            let tunings = tunings(arguments, &machine.linear(tp_size), &place, Some(machine))?;
            tune((machine, Processes::One), &tunings, Some(&mut file))
        }
        RankMachine::Process(_) => Err(only_threads()),
    }
}

/// This process is one of several CPU ranks, as Python's are. The first has the file, and prints.
fn with_processes(
    arguments: &TuneGemmArguments,
    launch: &Launch,
    rendezvous: &Arc<Rendezvous>,
) -> Result<(), CliError> {
    let ranks = &arguments.ranks;
    refuse_other_sizes(launch, "--tp-size", ranks.tp_size.unwrap_or(launch.world_size))?;
    let tp_size = checked_size(ranks, launch.world_size)?;
    if ranks.device == Device::Cuda {
        return Err(gpus_as_threads());
    }
    // Refuses transports that CPUs do not have.
    RankMachine::open(ranks.device, None, ranks.transport)?;
    let is_first = rendezvous.rank() == 0;
    let mut file = is_first.then(|| TunedFile::open(arguments.plans.as_deref())).transpose()?;
    let machine = TcpMachine::new(rendezvous.clone(), margin(arguments), ranks.slow_link)
        .map_err(|source| CliError::Run { source })?;
    let place = tuned::place_of_processes(ranks.slow_link);
    let tunings = tunings(arguments, &machine.linear(tp_size), &place, None)?;
    tune((&machine, Processes::Each(rendezvous)), &tunings, file.as_mut())
}

/// Cores that the policies leave free.
fn margin(arguments: &TuneGemmArguments) -> usize {
    arguments.overlap.iter().map(OverlapPolicy::sm_margin).max().unwrap_or(0)
}

/// What is asked for: every collective of every product.
fn tunings<'a>(
    arguments: &'a TuneGemmArguments,
    linear: &LinearMachine,
    place: &TunedPlace,
    gpus: Option<&CudaMachine>,
) -> Result<Vec<Tuning<'a>>, CliError> {
    let (products, flags) = match [arguments.m, arguments.n, arguments.k] {
        [Some(m), Some(n), Some(k)] => (vec![ProblemSize { m, n, k }], ["--k", "--n"]),
        _ => (arguments.shapes.clone(), ["--shapes"; 2]),
    };
    let dtype = dtype(&arguments.ranks);
    let pass = match arguments.pass {
        BenchTpPass::Forward => TunedPass::Forward,
        BenchTpPass::Backward => arguments.gradient.gradient(dtype).tuned_pass(),
    };
    // In a backward the product's columns are the layer's input features.
    let fields = match arguments.pass {
        BenchTpPass::Forward => [LinearField::InFeatures, LinearField::OutFeatures],
        BenchTpPass::Backward => [LinearField::OutFeatures, LinearField::InFeatures],
    };
    let named = [(fields[0], flags[0]), (fields[1], flags[1])];
    let policies = policies(arguments, linear);
    let cases = arguments
        .collective
        .iter()
        .flat_map(|collective| products.iter().map(move |size| (collective, size)));
    cases
        .map(|(collective, &size)| {
            let spec = collective.layer_of(pass.direction(), size, dtype);
            let spec = LinearSpec { has_bias: arguments.bias, ..spec };
            let tp_size = linear.topology.world_size;
            let variants = policies.iter().map(|&policy| {
                let searcher = searcher(arguments, spec, (tp_size, pass.direction()), policy, gpus)?;
                Ok(Variant { policy, searcher })
            });
            let variants = variants.collect::<Result<Vec<_>, CliError>>()?;
            let whole = LinearPlan::new(spec, tp_size, WaveGroups::Fixed(1))
                .map_err(|source| CliError::of_layer(source, &named))?;
            let shape = TunedShape::of(&spec, pass, linear.topology, place);
            let nothing = || CliError::usage(UsageFault::NothingTravels);
            Ok(Tuning { arguments, spec, pass, whole, shape: shape.ok_or_else(nothing)?, variants })
        })
        .collect()
}

/// The policies that are tried: those that were named, or all that these ranks run, with margins of several sizes.
fn policies(arguments: &TuneGemmArguments, linear: &LinearMachine) -> Vec<OverlapPolicy> {
    if !arguments.overlap.is_empty() {
        return arguments.overlap.clone();
    }
    let sizes = |workers: usize| vec![workers.div_ceil(2), workers, workers + workers / 2];
    let overlapping = linear.overlaps.iter().filter(|variant| !variant.is_sequential());
    overlapping.flat_map(|variant| variant.with_margins(sizes)).map(OverlapPolicy::from).collect()
}

/// Tunes one after the other. What is found is kept at once, so that who breaks off has what was found by then. Of several processes the one
/// with the file prints.
fn tune<M: Machine>(
    (machine, processes): (&M, Processes<'_>),
    tunings: &[Tuning<'_>],
    mut file: Option<&mut TunedFile>,
) -> Result<(), CliError> {
    if file.is_some() {
        console::note_development_build();
    }
    let begun = Instant::now();
    let mut summary = Summary::default();
    for tuning in tunings {
        let found = tuning.search(machine, processes)?;
        let Some(file) = file.as_deref_mut() else { continue };
        let kept = found.kept(tuning);
        file.keep(|plans| kept.into_iter().for_each(|plan| plans.layers.insert(plan)))?;
        found.print(tuning, file)?;
        summary.add(tuning, &found);
    }
    match tunings {
        [first, _, ..] if file.is_some() => summary.print(begun.elapsed(), first.arguments.ranks.json),
        _ => Ok(()),
    }
}

/// What is timed here are ranks of one process.
pub(crate) fn only_threads() -> CliError {
    CliError::usage(UsageFault::OnlyThreads)
}

/// Ranks that were asked for, or as many as there are GPUs; at least two.
pub(crate) fn tp_size(arguments: &RanksArguments, ranks: &RankMachine) -> Result<usize, CliError> {
    checked_size(arguments, arguments.tp_size.unwrap_or_else(|| ranks.gpus().max(2)))
}

fn checked_size(arguments: &RanksArguments, tp_size: usize) -> Result<usize, CliError> {
    if tp_size < 2 {
        return Err(CliError::flag("--tp-size", tp_size.to_string(), FlagFault::OneRank));
    }
    if let (Some(_), Device::Cuda) = (arguments.slow_link, arguments.device) {
        return Err(CliError::flag("--slow-link", "", FlagFault::ForCpuRanks));
    }
    Ok(tp_size)
}

/// The element type that was asked for, or the device's usual one.
pub(crate) fn dtype(arguments: &RanksArguments) -> DType {
    arguments.dtype.unwrap_or(match arguments.device {
        Device::Cpu => DType::F32,
        Device::Cuda => DType::Bf16,
    })
}

pub(crate) fn repeats(arguments: &RanksArguments) -> Repeats {
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
    (tp_size, direction): (usize, LinearDirection),
    policy: OverlapPolicy,
    gpus: Option<&CudaMachine>,
) -> Result<GroupSearcher, CliError> {
    let predicted_only = arguments.search == SearchArgument::Predictive;
    let waves = arguments.waves.unwrap_or(if predicted_only { PREDICTED_WAVES } else { MEASURED_WAVES });
    if !predicted_only && waves > MOST_WAVES {
        let fault = FlagFault::Sequences { sequences: 1 << (waves - 1), most: MOST_WAVES };
        return Err(CliError::flag("--waves", waves.to_string(), fault));
    }
    let mut wave = spec.tokens.div_ceil(tp_size).div_ceil(waves as usize);
    let takes_workers = arguments.ranks.transport != TransportKind::CopyEngine
        && policy.moves_by_transport()
        && policy.workers == WorkerShare::Common;
    let (mut overlapped_speed, mut link) = (1.0, LinkUse::Apart);
    if let Some(machine) = gpus {
        // Whole tiles of the rows of all ranks together.
        wave = wave.next_multiple_of(TILE_ROWS.div_ceil(tp_size));
        link = LinkUse::Shared;
        if takes_workers {
            let sharing = machine.worker_sharing();
            overlapped_speed = sharing.speed_without(sharing.communication);
        }
    }
    let starts = policy.start.rules().starts;
    let most_groups = arguments.most_groups as usize;
    let trials = TRIALS[1];
    Ok(GroupSearcher { spec, tp_size, direction, wave, most_groups, trials, starts, link, overlapped_speed })
}
