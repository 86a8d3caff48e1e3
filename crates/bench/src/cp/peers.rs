//! `bench cp --peers`: Ulysses, all-gather and PyTorch's ring attention, interleaved with ours.

use std::process::Command;

use counterpoint_console::{self as console, CliError, PeersFault};
use counterpoint_exec::Pass;
use counterpoint_mask::MaskPreset;
use counterpoint_report::{BenchRow, Column, Rate, Statistics, table};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::sizes::Sizes;
use crate::arguments::BenchCpArguments;
use crate::pytorch::{InterleavedRanks, PeerVariant, Peers, PyTorchNeeds, Script, on_gpus};

/// What the script says of a variant.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct PeerResult {
    by: String,
    pass: String,
    heads_q: usize,
    heads_kv: usize,
    error_over_bound: f64,
}

/// One of PyTorch's context parallelisms, compared with ours.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PeerRow {
    by: String,
    pass: String,
    mask: String,
    ranks: usize,
    tokens_per_rank: usize,
    heads_q: usize,
    heads_kv: usize,
    dtype: String,
    device: String,
    /// Of the slowest rank.
    seconds: Statistics,
    tflops_per_gpu: f64,
    error_over_bound: f64,
    ours_seconds: f64,
    /// Its time over ours.
    ratio: f64,
}

const TITLE: &str = "PyTorch and ours, interleaved: its time over ours\n";
const COLUMNS: [Column; 9] = [
    Column::name("by"),
    Column::name("mask"),
    Column::name("pass"),
    Column::number_name("tokens a rank"),
    Column::name("heads"),
    Column::number("us", 1),
    Column::number("TFLOP/s", 3),
    Column::number("ours us", 2),
    Column::number("ratio", 0),
];

/// Starts PyTorch's context parallelisms, if any are asked for, in the machine's own `python3`: a process a GPU.
pub(super) fn start(arguments: &BenchCpArguments, sizes: &Sizes) -> Result<Peers<PeerResult>, CliError> {
    if arguments.peers.is_empty() {
        return Ok(Peers::new(Vec::new()));
    }
    if !arguments.masks.iter().any(|mask| matches!(mask, MaskPreset::Full | MaskPreset::Causal)) {
        return Err(CliError::no_peers(PeersFault::FullAndCausal));
    }
    let script = Script::unpack("context_parallel.py")?;
    let commands = on_gpus(sizes.cp_size, || command(&script, arguments, sizes))?;
    Ok(Peers::new(vec![InterleavedRanks::start(script, commands, PyTorchNeeds::Gpus(sizes.cp_size))?]))
}

fn command(script: &Script, arguments: &BenchCpArguments, sizes: &Sizes) -> Command {
    let (heads_q, heads_kv) = sizes.heads;
    let mut command = script.command();
    command.args(["--peers", &arguments.peers.join(",")]);
    command.args(["--heads", &format!("{heads_q}:{heads_kv}"), "--head-dim", &sizes.head_dim.to_string()]);
    command
}

/// A mask on so many tokens a rank, as the script knows it.
pub(super) fn case(mask: MaskPreset, tokens: usize) -> serde_json::Value {
    json!({ "tokens": tokens, "mask": mask.name() })
}

/// Which of the case's variants run that pass.
pub(super) fn of_pass(peers: &Peers<PeerResult>, pass: Pass) -> Vec<usize> {
    peers.those(|known| known.pass == name_of(pass))
}

fn name_of(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => "forward",
        Pass::ForwardBackward => "backward",
    }
}

/// What the case's variants took of a pass, with the row of `ours`, interleaved with them, on `tokens` a rank.
pub(super) fn rows(peers: &Peers<PeerResult>, pass: Pass, ours: &BenchRow, tokens: usize) -> Vec<PeerRow> {
    let Some(Rate::Compute { tflops }) = ours.rate else { return Vec::new() };
    let row = |variant: &PeerVariant<PeerResult>| {
        let seconds = Statistics::of(&variant.seconds)?;
        let PeerResult { by, pass, heads_q, heads_kv, error_over_bound } = variant.known.clone();
        let ratio = seconds.median / ours.seconds.median;
        Some(PeerRow {
            by,
            pass,
            mask: ours.mask.clone().unwrap_or_default(),
            ranks: ours.ranks,
            tokens_per_rank: tokens,
            heads_q,
            heads_kv,
            dtype: ours.dtype.clone(),
            device: ours.device.clone(),
            seconds,
            // It computes as much.
            tflops_per_gpu: tflops / ratio,
            error_over_bound,
            ours_seconds: ours.seconds.median,
            ratio,
        })
    };
    peers.variants().iter().filter(|variant| variant.known.pass == name_of(pass)).filter_map(row).collect()
}

/// Prints rows, if there are any.
pub(super) fn print(rows: &[PeerRow]) -> Result<(), CliError> {
    if rows.is_empty() {
        return Ok(());
    }
    console::print(
        &(TITLE.to_owned() + &table(&COLUMNS, rows.iter().map(PeerRow::cells), &console::style()) + "\n"),
    )
}

impl PeerRow {
    fn cells(&self) -> Vec<String> {
        let tenths = |value: f64| format!("{value:.1}");
        vec![
            self.by.clone(),
            self.mask.clone(),
            self.pass.clone(),
            self.tokens_per_rank.to_string(),
            format!("{}:{}", self.heads_q, self.heads_kv),
            tenths(1e6 * self.seconds.median),
            tenths(self.tflops_per_gpu),
            tenths(1e6 * self.ours_seconds),
            format!("{:.3}", self.ratio),
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
        let line =
            r#"{"by": "ring", "pass": "backward", "heads_q": 64, "heads_kv": 64, "error_over_bound": 0.2}"#;
        let known: PeerResult = serde_json::from_str(line).unwrap();
        assert_eq!((known.by.as_str(), known.pass.as_str()), ("ring", name_of(Pass::ForwardBackward)));
        let names = ["forward", "backward", "full", "causal", "ring"];
        let keys = ["by", "pass", "heads_q", "heads_kv", "error_over_bound"];
        assert_strings("context_parallel.py", names.into_iter().chain(keys));
    }
}
