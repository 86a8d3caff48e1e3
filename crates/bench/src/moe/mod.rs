//! `counterpoint bench moe`, and the layers that `tune moe` tries.

mod case;
mod row;

use std::sync::Arc;

use counterpoint_choose::TunedHere;
use counterpoint_console::{
    self as console, CliError, CommandLine, Progress, Schema,
    arguments::Device,
    launched::{as_rank, ended, gpus_as_threads, launch, refuse_other_sizes},
    rank_machine::RankMachine,
    tuned,
};
use counterpoint_cuda::TransportKind;
use counterpoint_exec::{CpuMachine, Machine, RunConfig, TcpMachine};
use counterpoint_measure::Processes;
use counterpoint_plan::{DType, ExpertKind, ExpertSpec, RandomRouting, Routing};

use self::case::Case;
pub(crate) use self::case::Compared;
pub(crate) use self::row::ExpertsRow;
use crate::arguments::{BenchMoeArguments, MoeLayersArguments};
use crate::ranks::BenchRanks;
use crate::rows::Rows;
use counterpoint_console::FlagFault;

/// `counterpoint bench moe`.
pub(crate) fn run(arguments: &BenchMoeArguments, line: &CommandLine) -> Result<(), CliError> {
    let arguments = &arguments.layers;
    on_ranks(arguments, line, |ranks| {
        let plans = tuned::kept()?;
        ranks.agree("what was tuned and kept", &plans.to_json())?;
        let compared =
            Compared::Asked(Arc::new(TunedHere { place: ranks.tuned_place(arguments.slow_link), plans }));
        let show =
            |shown: &Rows<ExpertsRow>, rows: &[ExpertsRow]| rows.iter().try_for_each(|row| shown.show(row));
        each_kind(arguments, (ranks, Schema::BenchMoe), &compared, show)?.end("", WRONG)
    })
}

/// What rows that are wrong are.
pub(crate) const WRONG: &str = "results out of bounds against f64";

/// Does the work on the ranks that were asked for: here, or as one of the processes that a launcher started.
pub(crate) fn on_ranks(
    arguments: &MoeLayersArguments,
    line: &CommandLine,
    work: impl FnOnce(&BenchRanks) -> Result<(), CliError>,
) -> Result<(), CliError> {
    if let (Some(_), Device::Cuda) = (arguments.slow_link, arguments.device) {
        return Err(CliError::flag("--slow-link", "", FlagFault::ForCpuRanks));
    }
    let Some(launch) = launch()? else {
        let machine = RankMachine::open(arguments.device, arguments.ep_size, TransportKind::Auto)?;
        return work(&BenchRanks::Machine(machine));
    };
    as_rank(&launch, line, RunConfig::default().world.limit, |rendezvous| {
        refuse_other_sizes(&launch, "--ep-size", arguments.ep_size.unwrap_or(launch.world_size))?;
        if arguments.device == Device::Cuda {
            return Err(gpus_as_threads());
        }
        let machine = TcpMachine::new(rendezvous.clone(), 0, arguments.slow_link).map_err(ended)?;
        work(&BenchRanks::CpuProcess(rendezvous.clone(), machine))
    })
}

/// Measures the layers of each kind. `show` gets the rows of each that are right, and those that are wrong are named at the end.
pub(crate) fn each_kind(
    arguments: &MoeLayersArguments,
    (on, schema): (&BenchRanks, Schema),
    compared: &Compared,
    mut show: impl FnMut(&Rows<ExpertsRow>, &[ExpertsRow]) -> Result<(), CliError>,
) -> Result<Rows<ExpertsRow>, CliError> {
    let ranks = on.count(arguments.ep_size);
    let routing = routing(arguments, ranks)?;
    let rows = routing.rows();
    let (most, all) = (rows.iter().max().copied().unwrap_or(0), rows.iter().sum::<usize>());
    let title = format!(
        "layers of {} on {}, {}; {all} rows, {most} of them at the fullest expert",
        console::count(arguments.experts, "expert"),
        on.name(),
        console::count(ranks, "rank"),
    );
    let mut shown = Rows::begin(on.prints(), || Ok(title), schema, arguments.json)?;
    let progress = Progress::new();
    for kind in &arguments.kinds {
        let kind = kind.kind();
        progress.step(format!("{kind} of {}", console::count(arguments.experts, "expert")));
        let mut right = measure(arguments, kind, &routing, on, compared)?;
        right.retain(|row| shown.is_right(row));
        show(&shown, &right)?;
    }
    drop(progress);
    Ok(shown)
}

/// Who chooses whom, within the capacity.
fn routing(arguments: &MoeLayersArguments, ranks: usize) -> Result<Arc<Routing>, CliError> {
    let MoeLayersArguments { experts, choices, tokens, skew, seed, .. } = *arguments;
    if choices > experts {
        return Err(CliError::flag("--choices", choices.to_string(), FlagFault::Choices { experts }));
    }
    let routing = Routing::random(RandomRouting { experts, choices, ranks, tokens, skew, seed })
        .map_err(|error| CliError::flag("--experts", experts.to_string(), error))?;
    let Some(capacity) = arguments.capacity else { return Ok(Arc::new(routing)) };
    let most = (capacity * (ranks * tokens * choices) as f64 / experts as f64).ceil() as usize;
    let (within, dropped) = routing.within(most);
    console::note(&format!("{dropped} of {} rows are dropped", ranks * tokens * choices));
    Ok(Arc::new(within))
}

fn measure(
    arguments: &MoeLayersArguments,
    kind: ExpertKind,
    routing: &Arc<Routing>,
    on: &BenchRanks,
    compared: &Compared,
) -> Result<Vec<ExpertsRow>, CliError> {
    let usual = if arguments.device == Device::Cpu { DType::F32 } else { DType::Bf16 };
    let (in_features, out_features) = match kind {
        ExpertKind::Dispatch => (arguments.hidden, arguments.inner),
        ExpertKind::Combine => (arguments.inner, arguments.hidden),
    };
    let dtype = arguments.dtype.unwrap_or(usual);
    let spec = ExpertSpec { kind, in_features, out_features, dtype };
    let (ranks, device, place) = (routing.ranks(), on.name(), on.tuned_place(arguments.slow_link));
    let case = |cost, processes| Case {
        arguments,
        spec,
        routing,
        cost,
        device: &device,
        place: place.clone(),
        compared,
        processes,
    };
    let machine = match on {
        BenchRanks::CpuProcess(_, machine) => {
            // Without a profile, which hosts may have others of.
            return case(machine.linear(ranks).cost, on.processes()).measure_on(machine);
        }
        BenchRanks::Machine(machine) => machine,
    };
    let profile = machine.profile(None)?;
    let measured = profile.as_ref().map(|profile| &profile.cost);
    match machine {
        RankMachine::Cuda(gpus) => case(gpus.cost(measured, ranks), Processes::One).measure_on(gpus),
        // Processes are not opened so.
        RankMachine::Cpu(_) | RankMachine::Process(_) => {
            let cpu = CpuMachine::new(0, arguments.slow_link).map_err(ended)?;
            let cost = measured.copied().unwrap_or(cpu.linear(ranks).cost);
            case(cost, Processes::One).measure_on(&cpu)
        }
    }
}
