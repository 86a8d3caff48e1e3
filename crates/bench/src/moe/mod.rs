//! `counterpoint bench moe`, and the layers that `tune moe` tries.

mod case;
mod row;

use std::sync::Arc;

use counterpoint_choose::TunedHere;
use counterpoint_console::{
    self as console, CliError, Progress, Schema, arguments::Device, launched::launch,
    rank_machine::RankMachine, tuned,
};
use counterpoint_cuda::TransportKind;
use counterpoint_exec::{CpuMachine, Machine};
use counterpoint_plan::{DType, ExpertKind, ExpertSpec, Routing};

use self::case::Case;
pub(crate) use self::case::Compared;
pub(crate) use self::row::Row;
use crate::arguments::{BenchMoeArguments, MoeLayersArguments};
use crate::rows::Rows;

/// `counterpoint bench moe`.
pub(crate) fn run(arguments: &BenchMoeArguments) -> Result<(), CliError> {
    let arguments = &arguments.layers;
    let machine = open(arguments)?;
    let tuned = TunedHere { place: machine.tuned_place(arguments.slow_link), plans: tuned::kept()? };
    let compared = Compared::Asked(Arc::new(tuned));
    each_kind(arguments, (&machine, Schema::BenchMoe), &compared, |shown, rows| {
        rows.iter().try_for_each(|row| shown.show(row, row.cells()))
    })
    .and_then(|shown| shown.end("", WRONG))
}

/// What rows that are wrong are.
pub(crate) const WRONG: &str = "results out of bounds against f64";

/// The ranks that were asked for.
pub(crate) fn open(arguments: &MoeLayersArguments) -> Result<RankMachine, CliError> {
    if launch()?.is_some() {
        let reason = "is timed with ranks as threads of one process; run it without a launcher".to_owned();
        return Err(CliError::Flag { flag: "--ep-size", value: String::new(), reason });
    }
    if let (Some(_), Device::Cuda) = (arguments.slow_link, arguments.device) {
        let reason = "imitates a link between CPU ranks; leave it out with --device cuda".to_owned();
        return Err(CliError::Flag { flag: "--slow-link", value: String::new(), reason });
    }
    RankMachine::open(arguments.device, arguments.ep_size, TransportKind::Auto)
}

/// Measures the layers of each kind. `show` gets the rows of each that are right, and those that are wrong are named at the end.
pub(crate) fn each_kind(
    arguments: &MoeLayersArguments,
    (machine, schema): (&RankMachine, Schema),
    compared: &Compared,
    mut show: impl FnMut(&Rows, &[Row]) -> Result<(), CliError>,
) -> Result<Rows, CliError> {
    let ranks = arguments.ep_size.unwrap_or(machine.gpus().max(2));
    let routing = routing(arguments, ranks)?;
    let rows = routing.rows();
    let (most, all) = (rows.iter().max().copied().unwrap_or(0), rows.iter().sum::<usize>());
    let title = format!(
        "layers of {} on {}, {}; {all} rows, {most} of them at the fullest expert",
        console::count(arguments.experts, "expert"),
        machine.name(),
        console::count(ranks, "rank"),
    );
    let mut shown = Rows::begin(&title, &row::COLUMNS, schema, arguments.json)?;
    let progress = Progress::new();
    for kind in &arguments.kinds {
        let kind = kind.kind();
        progress.step(format!("{kind} of {}", console::count(arguments.experts, "expert")));
        let mut right = Vec::new();
        for row in measure(arguments, kind, &routing, machine, compared)? {
            match &row.wrong {
                Some(reason) => shown.add_wrong(format!("{}: {reason}", row.name())),
                None => right.push(row),
            }
        }
        show(&shown, &right)?;
    }
    drop(progress);
    Ok(shown)
}

/// Who chooses whom, within the capacity.
fn routing(arguments: &MoeLayersArguments, ranks: usize) -> Result<Arc<Routing>, CliError> {
    let MoeLayersArguments { experts, choices, tokens, skew, seed, .. } = *arguments;
    if choices > experts {
        let reason = format!("is more than the {experts} experts; choose fewer");
        return Err(CliError::Flag { flag: "--choices", value: choices.to_string(), reason });
    }
    let routing = Routing::random(experts, choices, [ranks, tokens], skew, seed).map_err(|error| {
        CliError::Flag { flag: "--experts", value: experts.to_string(), reason: error.to_string() }
    })?;
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
    machine: &RankMachine,
    compared: &Compared,
) -> Result<Vec<Row>, CliError> {
    let usual = if arguments.device == Device::Cpu { DType::F32 } else { DType::Bf16 };
    let (in_features, out_features) = match kind {
        ExpertKind::Dispatch => (arguments.hidden, arguments.inner),
        ExpertKind::Combine => (arguments.inner, arguments.hidden),
    };
    let dtype = arguments.dtype.unwrap_or(usual);
    let spec = ExpertSpec { kind, in_features, out_features, dtype };
    let (profile, device) = (machine.profile(None)?, machine.name());
    let measured = profile.as_ref().map(|profile| &profile.cost);
    let ranks = routing.ranks();
    let place = machine.tuned_place(arguments.slow_link);
    let case = |cost| Case { arguments, spec, routing, cost, device, place, compared };
    match machine {
        RankMachine::Cuda(gpus) => case(gpus.cost(measured, ranks)).measure_on(gpus),
        // Processes are refused above.
        RankMachine::Cpu(_) | RankMachine::Process(_) => {
            let cpu = CpuMachine::new(0, arguments.slow_link).map_err(|source| CliError::Run { source })?;
            let cost = measured.copied().unwrap_or(cpu.linear(ranks).cost);
            case(cost).measure_on(&cpu)
        }
    }
}
