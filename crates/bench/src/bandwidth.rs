//! `counterpoint bench bandwidth`.

use counterpoint_console::{
    self as console, CliError, FlagFault, Progress, Schema, arguments::dtype_name, rank_machine::RankMachine,
};
use counterpoint_exec::{CpuMachine, Machine};
use counterpoint_measure::{CollectiveShape, Processes};
use counterpoint_reference::LinearSample;
use counterpoint_report::{Column, Statistics, format_bytes, format_gbps, format_seconds, table};
use serde_json::json;

use crate::arguments::BenchBandwidthArguments;
use crate::tune::{dtype, only_threads, repeats, tp_size};

/// `counterpoint bench bandwidth`.
pub(crate) fn run(arguments: &BenchBandwidthArguments) -> Result<(), CliError> {
    let ranks =
        RankMachine::open(arguments.ranks.device, arguments.ranks.tp_size, arguments.ranks.transport)?;
    let tp_size = tp_size(&arguments.ranks, &ranks)?;
    if arguments.min_bytes > arguments.max_bytes {
        let fault = FlagFault::AboveMost { max_bytes: arguments.max_bytes };
        return Err(CliError::flag("--min-bytes", arguments.min_bytes.to_string(), fault));
    }
    console::note_development_build();
    match &ranks {
        RankMachine::Cpu(name) => {
            let machine =
                CpuMachine::new(0, arguments.ranks.slow_link).map_err(|source| CliError::Run { source })?;
            measure(&machine, name, tp_size, arguments)
        }
        RankMachine::Cuda(machine) => measure(machine, ranks.name(), tp_size, arguments),
        RankMachine::Process(_) => Err(only_threads()),
    }
}

fn measure<M: Machine>(
    machine: &M,
    device: &str,
    ranks: usize,
    arguments: &BenchBandwidthArguments,
) -> Result<(), CliError> {
    let dtype = dtype(&arguments.ranks);
    let timing = repeats(&arguments.ranks);
    let progress = Progress::new();
    let mut rows = Vec::new();
    for &collective in &arguments.collectives {
        let mut size = arguments.min_bytes;
        while size <= arguments.max_bytes {
            let row_bytes = (ranks * arguments.row_elements * dtype.size()) as u64;
            let rows_each = (size / row_bytes).max(1) as usize;
            let columns = arguments.row_elements;
            let shape = CollectiveShape { collective, ranks, rows: rows_each, columns, dtype };
            progress.step(format!("{} of {}", collective.name(), format_bytes(shape.bytes())));
            let times = shape.measure(machine, Processes::One, &timing, LinearSample::Whole);
            let times = times.map_err(|source| CliError::Run { source })?;
            let seconds: Vec<f64> = times.iter().map(|[there, back]| there + back).collect();
            size = size.saturating_mul(arguments.step_factor);
            let Some(seconds) = Statistics::of(&seconds) else { continue };
            let algbw = shape.bytes() as f64 / seconds.median / 1e9;
            let busbw = algbw * shape.bus_factor();
            if arguments.ranks.json {
                console::print_json(
                    Schema::BenchBandwidth,
                    &json!({
                        "name": collective.name(),
                        "device": device,
                        "ranks": ranks,
                        "size": shape.bytes(),
                        "dtype": dtype_name(dtype),
                        "iterations": timing.iterations,
                        "seconds": seconds,
                        "algbw": algbw,
                        "busbw": busbw,
                        // A row with a wrong element is not printed.
                        "wrong": 0,
                    }),
                )?;
                continue;
            }
            rows.push(vec![
                collective.name().to_owned(),
                format_bytes(shape.bytes()),
                format_seconds(seconds.median),
                format_seconds(seconds.min),
                format_gbps(algbw * 1e9),
                format_gbps(busbw * 1e9),
            ]);
        }
    }
    drop(progress);
    if arguments.ranks.json {
        return Ok(());
    }
    let columns = [
        Column::name("collective"),
        Column::number_name("size"),
        Column::number("median", 0),
        Column::number("min", 3),
        Column::number("algbw", 2),
        Column::number("busbw", 1),
    ];
    let header = format!("{device}, {}, {}\n\n", console::count(ranks, "rank"), dtype_name(dtype));
    console::print(&(header + &table(&columns, rows, &console::style())))
}
