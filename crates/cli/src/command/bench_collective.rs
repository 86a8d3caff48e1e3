//! `counterpoint bench group-cast` and `bench group-reduce`.

use std::fmt::Write;

use counterpoint_cuda::collective_bench::{
    BenchCollective, CollectiveCase, CollectiveTimes, bench_collective,
};
use counterpoint_cuda::{CudaMachine, Device, Timing, TransportKind};
use counterpoint_plan::DType;
use counterpoint_report::Statistics;
use serde::Serialize;

use crate::arguments::{BenchCollectiveArguments, CollectiveDType, dtype_name};
use crate::console;
use crate::error::CliError;
use crate::progress::Progress;

/// A measured case, as JSON has it.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    transport: String,
    device: String,
    ranks: usize,
    /// Bytes that each rank sends.
    size: u64,
    /// Elements that each rank sends.
    count: u64,
    dtype: &'static str,
    redop: &'static str,
    num_sms: u32,
    iterations: u32,
    seconds: Statistics,
    /// In GB/s (1e9).
    algbw: f64,
    busbw: f64,
    /// NCCL's time at this size in this run over this one's.
    ratio: Option<f64>,
    wrong: u64,
}

/// `counterpoint bench group-cast` and `bench group-reduce`.
pub(crate) fn run(collective: BenchCollective, arguments: &BenchCollectiveArguments) -> Result<(), CliError> {
    console::note_development_build();
    let failed = |source| CliError::Cuda { source };
    let gpus = Device::count().map_err(failed)?;
    let ranks = arguments.gpus.map_or(gpus, |gpus| gpus as usize);
    if ranks < 2 {
        let reason = "is one rank, which moves nothing; give -g 2 to let two share it, or use more GPUs";
        return Err(CliError::Flag { flag: "--gpus", value: ranks.to_string(), reason: reason.to_owned() });
    }
    let machine = CudaMachine::for_ranks(ranks, Timing::Off).map_err(failed)?.with_num_sms(arguments.num_sms);
    let mut transports = arguments.transports.clone();
    transports.sort_by_key(|transport| *transport != TransportKind::Nccl);
    if !arguments.json {
        console::print(&header(collective, &machine, ranks))?;
    }
    let mut wrong = Vec::new();
    let mut size = arguments.min_bytes;
    while size <= arguments.max_bytes {
        let case = case(collective, arguments, ranks, size);
        let mut nccl = None;
        for &transport in &transports {
            let progress = Progress::new();
            progress.step(format!("{} bytes, {transport}", case.bytes()));
            let machine = machine.clone().with_transport(transport).map_err(failed)?;
            let times = bench_collective(&machine, &case).map_err(|source| CliError::Run { source })?;
            drop(progress);
            let Some(row) = row(&machine, arguments, &case, &times, nccl) else { continue };
            if transport == TransportKind::Nccl {
                nccl = Some(row.seconds.median);
            }
            if row.wrong > 0 {
                wrong.push(format!("{} elements of {transport} at {} bytes", row.wrong, row.size));
            }
            if arguments.json { console::print_json(&row)? } else { console::print(&line(&row))? }
        }
        size = size.saturating_mul(arguments.step_factor);
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(CliError::CheckFailed { what: format!("rows in the wrong place: {}", wrong.join("; ")) })
}

fn case(
    collective: BenchCollective,
    arguments: &BenchCollectiveArguments,
    ranks: usize,
    size: u64,
) -> CollectiveCase {
    let dtype = match (arguments.dtype, collective) {
        (Some(CollectiveDType::F32), _) | (None, BenchCollective::GroupReduce) => DType::F32,
        (Some(CollectiveDType::Bf16), _) | (None, BenchCollective::GroupCast) => DType::Bf16,
        (Some(CollectiveDType::F16), _) => DType::F16,
    };
    let mut case = CollectiveCase {
        collective,
        ranks,
        dtype,
        row_elements: arguments.row_elements,
        rows: 1,
        split_rows: arguments.split_rows,
        warmups: arguments.warmups as usize,
        iterations: arguments.iterations as usize,
        samples: arguments.cycles as usize,
        limit: arguments.limit,
    };
    // As many whole rows as come nearest from below, one at least.
    case.rows = (size / case.bytes()).max(1) as usize;
    case
}

fn row(
    machine: &CudaMachine,
    arguments: &BenchCollectiveArguments,
    case: &CollectiveCase,
    times: &CollectiveTimes,
    nccl: Option<f64>,
) -> Option<Row> {
    let seconds = Statistics::of(&times.seconds)?;
    // Everything that a rank sends leaves its GPU, so that the links carry what the operation moves.
    let rate = case.bytes() as f64 / seconds.median / 1e9;
    let (name, redop) = match case.collective {
        BenchCollective::GroupCast => ("group-cast", "none"),
        BenchCollective::GroupReduce => ("group-reduce", "sum"),
    };
    Some(Row {
        name,
        transport: machine.transport().to_string(),
        device: machine.devices()[0].properties().name.clone(),
        ranks: case.ranks,
        size: case.bytes(),
        count: case.elements(),
        dtype: dtype_name(case.dtype),
        redop,
        num_sms: arguments.num_sms,
        iterations: arguments.iterations,
        ratio: nccl.map(|nccl| nccl / seconds.median),
        seconds,
        algbw: rate,
        busbw: rate,
        wrong: times.wrong,
    })
}

fn header(collective: BenchCollective, machine: &CudaMachine, ranks: usize) -> String {
    let name = match collective {
        BenchCollective::GroupCast => "group-cast",
        BenchCollective::GroupReduce => "group-reduce",
    };
    let gpus = console::count(machine.devices().len(), "GPU");
    let device = &machine.devices()[0].properties().name;
    format!(
        "{name}, {} on {gpus} ({device})\n{:>12} {:>11} {:>5} {:>5} {:>11} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>7}\n",
        console::count(ranks, "rank"),
        "size",
        "count",
        "type",
        "redop",
        "transport",
        "time",
        "min",
        "max",
        "algbw",
        "busbw",
        "#wrong",
        "vs nccl"
    ) + &format!(
        "{:>12} {:>11} {:>5} {:>5} {:>11} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
        "(B)", "(elements)", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)"
    )
}

fn line(row: &Row) -> String {
    let Row { size, count, dtype, redop, transport, seconds, algbw, busbw, wrong, ratio, .. } = row;
    let [time, min, max] = [seconds.median, seconds.min, seconds.max].map(|seconds| 1e6 * seconds);
    let mut line = format!(
        "{size:>12} {count:>11} {dtype:>5} {redop:>5} {transport:>11} {time:>9.1} {min:>9.1} {max:>9.1} {algbw:>9.1} \
         {busbw:>9.1} {wrong:>6}"
    );
    if let Some(ratio) = ratio {
        let _ = write!(line, " {ratio:>6.2}x");
    }
    line.push('\n');
    line
}
