//! `bench gemm-collective --peers`: PyTorch's ways, symmetric memory among them, interleaved with the fastest of ours.

use std::process::Command;

use counterpoint_console::{self as console, CliError, PeersFault, arguments::Device};
use counterpoint_cost::ProblemSize;
use counterpoint_exec::GemmCollectiveSpec;
use counterpoint_report::{Column, Statistics, geometric_mean, table};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::row::GemmCollectiveRow;
use crate::arguments::{BenchDType, BenchGemmCollectiveArguments};
use crate::pytorch::{InterleavedRanks, PeerVariant, Peers, PyTorchNeeds, Script, on_gpus};
use crate::rows::MeasuredRow;

/// What the script says of a way.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct PeerResult {
    by: String,
    /// Runs of a cycle, one after the other.
    iterations: usize,
    error: f64,
}

/// A product with its collective in one of PyTorch's ways, compared with the fastest of ours.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PeerRow {
    by: String,
    collective: &'static str,
    ranks: usize,
    m: usize,
    n: usize,
    k: usize,
    /// Of the slowest rank, the median of cycles.
    seconds: f64,
    error: f64,
    ours_seconds: f64,
    /// Its time over ours.
    ratio: f64,
    ours_by: String,
}

const TITLE: &str = "\nPyTorch and the fastest of the rows above, interleaved: its time over ours\n";
const COLUMNS: [Column; 10] = [
    Column::name("collective"),
    Column::number_name("m"),
    Column::number_name("n"),
    Column::number_name("k"),
    Column::name("by"),
    Column::number("us", 1),
    Column::number("ours us", 2),
    Column::number("ratio", 0),
    Column::number("error", 4),
    Column::text("ours by", 3),
];

/// Starts PyTorch's ways, if any are asked for, in the machine's own `python3`: a process a GPU.
pub(super) fn start(arguments: &BenchGemmCollectiveArguments) -> Result<Peers<PeerResult>, CliError> {
    if arguments.peers.is_empty() {
        return Ok(Peers::new(Vec::new()));
    }
    if arguments.device == Device::Cpu {
        return Err(CliError::no_peers(PeersFault::ForGpus));
    }
    let script = Script::unpack("gemm_collective.py")?;
    let ranks = arguments.ranks as usize;
    let commands = on_gpus(ranks, || command(&script, arguments))?;
    Ok(Peers::new(vec![InterleavedRanks::start(script, commands, PyTorchNeeds::Gpus(ranks))?]))
}

fn command(script: &Script, arguments: &BenchGemmCollectiveArguments) -> Command {
    let dtype = match arguments.dtype {
        Some(BenchDType::F16) => "f16",
        Some(BenchDType::Bf16) | None => "bf16",
    };
    let mut command = script.command();
    command.args(["--peers", &arguments.peers.join(","), "--dtype", dtype]);
    command.args(["--iterations", &arguments.iterations.to_string()]);
    command
}

/// A product, as the script knows it.
pub(super) fn case(spec: &GemmCollectiveSpec) -> serde_json::Value {
    let ProblemSize { m, n, k } = spec.size;
    json!({ "collective": spec.collective.name(), "shape": [m, n, k] })
}

/// What the product's ways took, with `ours`, interleaved with them.
pub(super) fn rows(peers: &Peers<PeerResult>, ours: &[GemmCollectiveRow]) -> Vec<PeerRow> {
    let right = ours.iter().filter(|row| row.fault().is_none());
    let Some(best) = right.min_by(|a, b| a.seconds.total_cmp(&b.seconds)) else { return Vec::new() };
    let row = |variant: &PeerVariant<PeerResult>| {
        let PeerResult { by, iterations, error } = variant.known.clone();
        let seconds = Statistics::of(&variant.seconds)?.median / iterations as f64;
        let GemmCollectiveRow { collective, ranks, m, n, k, .. } = *best;
        let ratio = seconds / best.seconds;
        let (ours_seconds, ours_by) = (best.seconds, best.overlap.clone());
        Some(PeerRow { by, collective, ranks, m, n, k, seconds, error, ours_seconds, ratio, ours_by })
    };
    peers.variants().iter().filter_map(row).collect()
}

/// Prints rows, if there are any, and what to read from them.
pub(super) fn print(rows: &[PeerRow]) -> Result<(), CliError> {
    if rows.is_empty() {
        return Ok(());
    }
    console::print(
        &(TITLE.to_owned() + &table(&COLUMNS, rows.iter().map(PeerRow::cells), &console::style())),
    )?;
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for row in rows {
        let which = (row.by.as_str(), row.collective);
        if seen.contains(&which) {
            continue;
        }
        seen.push(which);
        let same = rows.iter().filter(|row| (row.by.as_str(), row.collective) == which);
        let ratios: Vec<f64> = same.map(|row| row.ratio).collect();
        let (mean, least) = (geometric_mean(&ratios), ratios.iter().copied().fold(f64::INFINITY, f64::min));
        let products = console::count(ratios.len(), "product");
        let mean = mean.unwrap_or(f64::NAN);
        let (by, collective) = which;
        console::print(&format!(
            "{by}, {collective}: {products}, geometric mean {mean:.3}, worst {least:.3}\n"
        ))?;
    }
    Ok(())
}

impl PeerRow {
    fn cells(&self) -> Vec<String> {
        let Self { by, collective, m, n, k, error, ours_by, ratio, .. } = self;
        let us = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        vec![
            (*collective).to_owned(),
            m.to_string(),
            n.to_string(),
            k.to_string(),
            by.clone(),
            us(self.seconds),
            us(self.ours_seconds),
            format!("{ratio:.3}"),
            format!("{error:.1e}"),
            ours_by.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::GemmCollective;

    use super::*;
    use crate::pytorch::assert_strings;

    /// What the script says of its ways is what is read here, and both know the same names.
    #[test]
    fn ways_of_the_script_are_understood() {
        let line = r#"{"by": "async-tp", "iterations": 4, "error": 2e-3, "error_over_bound": 0.2}"#;
        let known: PeerResult = serde_json::from_str(line).unwrap();
        assert_eq!((known.by.as_str(), known.iterations), ("async-tp", 4));
        let names = GemmCollective::NAMES.map(|(name, _)| name);
        assert_strings("gemm_collective.py", names.into_iter().chain(["by", "iterations", "error"]));
    }
}
