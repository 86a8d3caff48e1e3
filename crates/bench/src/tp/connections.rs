//! The same cases with several numbers of hardware queues. The driver reads their number when a process starts, so each has a
//! process of its own.

use std::process::{Command, Stdio};

use counterpoint_console::{
    self as console, CheckFault, ChildFault, CliError, CommandLine, OwnProcess, Schema,
};
use serde::Deserialize;

use counterpoint_report::{Column, table as report_table};

use super::peers::{self, PeerRow};
use super::row::{LinearRow, title};
use crate::arguments::BenchTpArguments;
use crate::rows::Rows;

/// The driver's own variable.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// What such a process is not given, or in another variant.
const LEFT_OUT: [&str; 4] = ["connections", "peers", "trace", "json"];

/// How many hardware queues this process's driver was given.
pub(super) fn here() -> Option<u32> {
    std::env::var(CONNECTIONS).ok()?.parse().ok()
}

/// What such a process prints.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Ours(Box<LinearRow>),
    Peer(Box<PeerRow>),
}

/// Measures with each number in turn. A number may be named several times: its best median counts. PyTorch's variants are interleaved with
/// those of ours that have as many. Where a process fails, what was measured until then is kept.
pub(super) fn run(arguments: &BenchTpArguments, line: &CommandLine) -> Result<(), CliError> {
    let (mut all, mut of_peers): (Vec<LinearRow>, Vec<PeerRow>) = Default::default();
    let mut shown: Option<Rows<LinearRow>> = None;
    let mut ended = Ok(());
    for &connections in &arguments.connections {
        let (lines, end) = in_child(arguments, line, connections)?;
        let mut rows = Vec::new();
        for line in lines {
            match line {
                Line::Ours(row) => rows.push(*row),
                Line::Peer(row) => of_peers.push(*row),
            }
        }
        if let (None, Some(LinearRow { device, ranks, .. })) = (&shown, rows.first()) {
            let title = || Ok(title(device, *ranks));
            shown = Some(Rows::begin(true, title, Schema::BenchTp, arguments.json)?);
        }
        if let Some(shown) = &shown {
            if shown.are_text() {
                console::print(&format!("{}:\n", console::count(connections as usize, "hardware queue")))?;
            }
            rows.iter().try_for_each(|row| shown.show(row))?;
        }
        all.extend(rows);
        ended = ended.and(end);
        if ended.is_err() {
            break;
        }
    }
    if arguments.json {
        of_peers.iter().try_for_each(|row| console::print_json(Schema::BenchTpPeer, row))?;
    } else {
        console::print(&spreads(&all))?;
        peers::print(&of_peers)?;
    }
    ended
}

/// What it has printed, and how it ended.
fn in_child(
    arguments: &BenchTpArguments,
    line: &CommandLine,
    connections: u32,
) -> Result<(Vec<Line>, Result<(), CliError>), CliError> {
    let failed = |reason: ChildFault| CliError::check(CheckFault::Child { connections, reason });
    let program = counterpoint_console::program::file().map_err(|error| failed(error.into()))?;
    let mut child = Command::new(program);
    child.args(line.again_without(&LEFT_OUT)).arg("--json").env(CONNECTIONS, connections.to_string());
    if arguments.peers.contains(&connections) {
        child.arg(format!("--peers={connections}"));
    }
    let process = OwnProcess::start(child.stdin(Stdio::null()).stdout(Stdio::piped()));
    let output = process.and_then(|process| process.output());
    let (status, said) = output.map_err(|error| failed(error.into()))?;
    // It has said why.
    let end = if status.success() { Ok(()) } else { Err(failed(ChildFault::Ended(status))) };
    let text = String::from_utf8_lossy(&said);
    let lines = text.lines().map(serde_json::from_str);
    // Of one that failed the last line may be cut.
    let whole = |line: &Result<Line, _>| end.is_ok() || line.is_ok();
    let lines: Result<Vec<Line>, serde_json::Error> = lines.take_while(whole).collect();
    Ok((lines.map_err(|error| failed(error.into()))?, end))
}

/// Of each case its best median with every number of queues and what part of the sequential pass that is, interleaved with it, and
/// the largest of these parts over the smallest: processes that follow each other find a GPU at other clocks.
fn spreads(rows: &[LinearRow]) -> String {
    let same = |a: &LinearRow, b: &LinearRow| (a.name(), a.groups_text()) == (b.name(), b.groups_text());
    let mut lines = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        if row.is_sequential() || rows[..at].iter().any(|before| same(before, row)) {
            continue;
        }
        let mut best: Vec<(u32, f64, f64)> = Vec::new();
        for other in rows.iter().filter(|other| same(other, row)) {
            let (queues, seconds) = (other.connections.unwrap_or(0), other.seconds.median);
            let part = seconds / other.sequential_seconds;
            match best.iter_mut().find(|(found, ..)| *found == queues) {
                Some((_, least, least_part)) => {
                    (*least, *least_part) = (least.min(seconds), least_part.min(part))
                }
                None => best.push((queues, seconds, part)),
            }
        }
        let most = best.iter().map(|(.., part)| *part).fold(0.0, f64::max);
        let least = best.iter().map(|(.., part)| *part).fold(f64::INFINITY, f64::min);
        for (queues, seconds, part) in best {
            lines.push(vec![
                row.name(),
                row.groups_text(),
                queues.to_string(),
                format!("{:.1}", 1e6 * seconds),
                format!("{part:.3}"),
                format!("{:.3}", most / least),
            ]);
        }
    }
    let columns = [
        Column::name("layer"),
        Column::number_name("groups"),
        Column::number_name("queues"),
        Column::number("us", 0),
        Column::number("of sequential", 1),
        Column::number("largest / smallest", 1),
    ];
    "\nby hardware queues: the part of the sequential pass of the same process, and the largest part over the smallest\n"
        .to_owned()
        + &report_table(&columns, lines, &console::style())
}
