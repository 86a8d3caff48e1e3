use std::process::Command;

use super::sizes::Sizes;
use crate::arguments::{BenchCpArguments, BenchMask};
use crate::command::bench_mask;
use crate::command::pytorch::run_script_on_gpus;
use crate::error::CliError;

/// Times PyTorch's context parallelisms on the same sizes.
const SCRIPT: &str = include_str!("../../../../../benches/peers/context_parallel.py");

/// Runs the peers in the machine's own `python3`, one process a GPU, after our rows: they need the GPUs.
pub(super) fn run(names: &str, arguments: &BenchCpArguments, sizes: &Sizes) -> Result<(), CliError> {
    let no_peers = |reason: String| CliError::NoPeers { reason };
    // The masks that they have.
    let masks: Vec<String> = arguments
        .masks
        .iter()
        .filter(|mask| matches!(mask, BenchMask::Full | BenchMask::Causal))
        .map(|mask| bench_mask::name(*mask))
        .collect();
    if masks.is_empty() {
        return Err(no_peers("the peers have full and causal masks only; ask for one of them".to_owned()));
    }
    run_script_on_gpus(SCRIPT, sizes.cp_size, || command(names, &masks, arguments, sizes))
}

fn command(names: &str, masks: &[String], arguments: &BenchCpArguments, sizes: &Sizes) -> Command {
    let tokens: Vec<String> = sizes.tokens.iter().map(ToString::to_string).collect();
    let (heads_q, heads_kv) = sizes.heads;
    let mut command = Command::new("python3");
    command.arg("-").args(["--peers", names, "--masks", &masks.join(","), "--tokens", &tokens.join(",")]);
    command.args(["--heads", &format!("{heads_q}:{heads_kv}"), "--head-dim", &sizes.head_dim.to_string()]);
    command.args(["--iterations", &arguments.iterations.to_string()]);
    if arguments.json {
        command.arg("--json");
    }
    command
}
