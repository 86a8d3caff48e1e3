use std::process::Command;

use super::sizes::Sizes;
use crate::arguments::{BenchCpArguments, BenchMask};
use crate::command::bench_mask;
use crate::command::pytorch::{Script, lacks_gpus, on_gpus, run_all};
use crate::error::CliError;

/// Times PyTorch's context parallelisms on the same sizes, in the machine's own `python3`, one process a GPU, after our rows: they need the GPUs.
pub(super) fn run(arguments: &BenchCpArguments, sizes: &Sizes) -> Result<(), CliError> {
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
    let script = Script::unpack("context_parallel.py")?;
    let commands = on_gpus(sizes.cp_size, || command(&script, &masks, arguments, sizes))?;
    run_all(commands, &lacks_gpus(sizes.cp_size))
}

fn command(script: &Script, masks: &[String], arguments: &BenchCpArguments, sizes: &Sizes) -> Command {
    let tokens: Vec<String> = sizes.tokens.iter().map(ToString::to_string).collect();
    let (heads_q, heads_kv) = sizes.heads;
    let mut command = script.command();
    command.args([
        "--peers",
        &arguments.peers.join(","),
        "--masks",
        &masks.join(","),
        "--tokens",
        &tokens.join(","),
    ]);
    command.args(["--heads", &format!("{heads_q}:{heads_kv}"), "--head-dim", &sizes.head_dim.to_string()]);
    command.args(["--iterations", &arguments.iterations.to_string()]);
    if arguments.json {
        command.arg("--json");
    }
    command
}
