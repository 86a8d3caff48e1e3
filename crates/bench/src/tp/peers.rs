//! `bench tp --peers`: PyTorch's tensor-parallel layers, interleaved with the fastest of ours.

use std::process::Command;

use counterpoint_console::{self as console, CliError};
use counterpoint_plan::{Activations, LinearKind};
use counterpoint_report::{Column, Statistics, table};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::row::LinearRow;
use crate::arguments::{BenchTpArguments, BenchTpPass, LayerShape};
use crate::pytorch::{InterleavedRanks, PeerVariant, Peers, PyTorchNeeds, Script, on_gpus};

/// CUDA's own number of connections, which it uses where the variable is not set.
const USUAL_CONNECTIONS: u32 = 8;

/// What the script says of a variant.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct PeerResult {
    by: String,
    pub(super) pass: BenchTpPass,
    connections: String,
    error_over_bound: f64,
}

/// A layer in one of PyTorch's variants, compared with the fastest of ours.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PeerRow {
    by: String,
    kind: LinearKind,
    pass: BenchTpPass,
    activations: Activations,
    shape: LayerShape,
    ranks: usize,
    connections: String,
    /// Of the slowest rank.
    seconds: Statistics,
    tflops: f64,
    error_over_bound: f64,
    ours_seconds: f64,
    /// Its time over ours.
    ratio: f64,
    ours_by: String,
}

const TITLE: &str = "\nPyTorch and the fastest of the rows above, interleaved: its time over ours\n";
const COLUMNS: [Column; 11] = [
    Column::name("by"),
    Column::name("kind"),
    Column::name("pass"),
    Column::name("activations"),
    Column::name("shape"),
    Column::number_name("connections"),
    Column::number("us", 1),
    Column::number("TFLOP/s", 3),
    Column::number("ours us", 2),
    Column::number("ratio", 0),
    Column::text("ours by", 4),
];

/// Prints rows, if there are any.
pub(super) fn print(rows: &[PeerRow]) -> Result<(), CliError> {
    if rows.is_empty() {
        return Ok(());
    }
    console::print(&(TITLE.to_owned() + &table(&COLUMNS, rows.iter().map(PeerRow::cells), &console::style())))
}

/// Starts PyTorch's variants to run a tensor-parallel layer, in the machine's own `python3`: a process a GPU for each number of connections
/// that is asked for, which CUDA reads when it starts.
pub(super) fn start(arguments: &BenchTpArguments, tp_size: usize) -> Result<Peers<PeerResult>, CliError> {
    let group = |connections: u32| {
        let script = Script::unpack("tensor_parallel.py")?;
        let process = || {
            let mut command = command(&script, arguments);
            match connections {
                USUAL_CONNECTIONS => command.env_remove("CUDA_DEVICE_MAX_CONNECTIONS"),
                number => command.env("CUDA_DEVICE_MAX_CONNECTIONS", number.to_string()),
            };
            command
        };
        let commands = on_gpus(tp_size, process)?;
        InterleavedRanks::start(script, commands, PyTorchNeeds::Gpus(tp_size))
    };
    let groups = arguments.peers.iter().map(|&connections| group(connections));
    Ok(Peers::new(groups.collect::<Result<_, _>>()?))
}

/// A layer, as the script knows it.
pub(super) fn case(shape: LayerShape, kind: LinearKind, activations: Activations) -> serde_json::Value {
    json!({ "shape": shape, "kind": kind, "activations": activations })
}

/// What a layer's variants took, with `ours`, interleaved with them.
pub(super) fn rows(peers: &Peers<PeerResult>, ours: &[LinearRow]) -> Vec<PeerRow> {
    let row = |variant: &PeerVariant<PeerResult>| {
        let PeerResult { by, pass, connections, error_over_bound } = variant.known.clone();
        let right = ours.iter().filter(|row| row.pass == pass && row.wrong.is_none());
        let best = right.min_by(|a, b| a.seconds.median.total_cmp(&b.seconds.median))?;
        let seconds = Statistics::of(&variant.seconds)?;
        let groups = match best.in_columns {
            true => format!("{} groups of columns", best.groups),
            false => console::count(best.groups, "group"),
        };
        Some(PeerRow {
            by,
            kind: best.kind,
            pass,
            activations: best.activations,
            shape: best.shape,
            ranks: best.ranks,
            connections,
            tflops: best.tflops * best.seconds.median / seconds.median,
            error_over_bound,
            ours_seconds: best.seconds.median,
            ratio: seconds.median / best.seconds.median,
            ours_by: format!("{} {}, {}", best.policy, best.transport, groups),
            seconds,
        })
    };
    peers.variants().iter().filter_map(row).collect()
}

fn command(script: &Script, arguments: &BenchTpArguments) -> Command {
    let name = |pass: &BenchTpPass| serde_json::to_value(pass).ok()?.as_str().map(str::to_owned);
    let passes: Vec<String> = arguments.passes.iter().filter_map(name).collect();
    let mut command = script.command();
    command.args(["--passes", &passes.join(",")]);
    command
}

impl PeerRow {
    fn cells(&self) -> Vec<String> {
        let tenths = |value: f64| format!("{value:.1}");
        vec![
            self.by.clone(),
            self.kind.to_string(),
            self.pass.to_string(),
            self.activations.to_string(),
            self.shape.to_string(),
            self.connections.clone(),
            tenths(1e6 * self.seconds.median),
            tenths(self.tflops),
            tenths(1e6 * self.ours_seconds),
            format!("{:.3}", self.ratio),
            self.ours_by.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pytorch::assert_strings;

    /// What the script says of its variants is what is read here, and both know the same names.
    #[test]
    fn ways_of_the_script_are_understood() {
        let line = r#"{"by": "megatron", "pass": "backward", "error_over_bound": 0.3, "wide_addmm": true, "connections": "unset"}"#;
        let known: PeerResult = serde_json::from_str(line).unwrap();
        assert_eq!((known.by.as_str(), known.pass), ("megatron", BenchTpPass::Backward));
        assert_strings("tensor_parallel.py", ["column", "row", "replicated", "sequence_parallel"]);
        assert_strings("layers/passes.py", ["forward", "backward", "megatron", "async_tp"]);
    }
}
