//! `counterpoint bench moe`.

mod case;
mod row;

use std::sync::Arc;

use counterpoint_console::{
    self as console, CliError, Progress, Schema, arguments::Device, launched::launch,
    rank_machine::RankMachine,
};
use counterpoint_cuda::TransportKind;
use counterpoint_exec::CpuMachine;
use counterpoint_exec::Machine;
use counterpoint_plan::{DType, ExpertKind, ExpertSpec, Routing, Topology};
use counterpoint_schedule::RankTransport;

use self::case::Case;
use self::row::Row;
use crate::arguments::BenchMoeArguments;
use crate::rows::Rows;

/// `counterpoint bench moe`.
pub(crate) fn run(arguments: &BenchMoeArguments) -> Result<(), CliError> {
    if launch()?.is_some() {
        let reason = "is timed with ranks as threads of one process; run it without a launcher".to_owned();
        return Err(CliError::Flag { flag: "--ep-size", value: String::new(), reason });
    }
    if let (Some(_), Device::Cuda) = (arguments.slow_link, arguments.device) {
        let reason = "imitates a link between CPU ranks; leave it out with --device cuda".to_owned();
        return Err(CliError::Flag { flag: "--slow-link", value: String::new(), reason });
    }
    let machine = RankMachine::open(arguments.device, arguments.ep_size, TransportKind::Auto)?;
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
    let mut shown = Rows::begin(&title, &row::COLUMNS, Schema::BenchMoe, arguments.json)?;
    let progress = Progress::new();
    for kind in &arguments.kinds {
        let kind = kind.kind();
        progress.step(format!("{kind} of {}", console::count(arguments.experts, "expert")));
        for row in measure(arguments, kind, &routing, &machine)? {
            match &row.wrong {
                Some(reason) => shown.add_wrong(format!("{}: {reason}", row.name())),
                None => shown.show(&row, row.cells())?,
            }
        }
    }
    drop(progress);
    shown.end("", "results out of bounds against f64")
}

/// Who chooses whom, within the capacity.
fn routing(arguments: &BenchMoeArguments, ranks: usize) -> Result<Arc<Routing>, CliError> {
    let BenchMoeArguments { experts, choices, tokens, skew, seed, .. } = *arguments;
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
    arguments: &BenchMoeArguments,
    kind: ExpertKind,
    routing: &Arc<Routing>,
    machine: &RankMachine,
) -> Result<Vec<Row>, CliError> {
    let usual = if arguments.device == Device::Cpu { DType::F32 } else { DType::Bf16 };
    let (in_features, out_features) = match kind {
        ExpertKind::Dispatch => (arguments.hidden, arguments.inner),
        ExpertKind::Combine => (arguments.inner, arguments.hidden),
    };
    let dtype = arguments.dtype.unwrap_or(usual);
    let spec = ExpertSpec { kind, in_features, out_features, dtype };
    let (ranks, topology) = (routing.ranks(), Topology::flat(routing.ranks()));
    let profile = machine.profile(None)?;
    let measured = profile.as_ref().map(|profile| &profile.cost);
    let case = |cost, transports: &'static [RankTransport]| Case {
        arguments,
        spec,
        routing,
        topology,
        transports,
        cost,
        device: machine.name(),
    };
    match machine {
        RankMachine::Cuda(gpus) => {
            case(gpus.cost(measured, ranks), RankTransport::of_gpus(&topology)).measure_on(gpus)
        }
        // Processes are refused above.
        RankMachine::Cpu(_) | RankMachine::Process(_) => {
            let cpu = CpuMachine::new(0, arguments.slow_link).map_err(|source| CliError::Run { source })?;
            let cost = measured.copied().unwrap_or(cpu.linear(ranks).cost);
            case(cost, &[RankTransport::Cpu]).measure_on(&cpu)
        }
    }
}
