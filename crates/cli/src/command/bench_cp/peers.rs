use std::io::Write;
use std::process::{Command, Stdio};

use super::sizes::Sizes;
use crate::arguments::{BenchCpArguments, BenchMask};
use crate::command::bench_mask;
use crate::error::CliError;

/// Times PyTorch's context parallelisms on the same sizes.
const SCRIPT: &str = include_str!("../../../../../benches/peers/context_parallel.py");

/// Runs the peers in the machine's own `python3`, after our rows: their processes need the GPUs. The script starts one process
/// a GPU, which must find it as a file.
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
    let mut file = tempfile::Builder::new()
        .prefix("context_parallel")
        .suffix(".py")
        .tempfile()
        .map_err(|error| no_peers(format!("the script cannot be written ({error})")))?;
    file.write_all(SCRIPT.as_bytes())
        .map_err(|error| no_peers(format!("the script cannot be written ({error})")))?;
    let list = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>().join(",");
    let (heads_q, heads_kv) = sizes.heads;
    let mut command = Command::new("python3");
    command.arg(file.path()).args(["--gpus", &sizes.cp_size.to_string(), "--peers", names]);
    command.args(["--masks", &masks.join(",")]);
    command.args(["--tokens", &list(&mut sizes.tokens.iter().map(ToString::to_string))]);
    command.args(["--heads", &format!("{heads_q}:{heads_kv}"), "--head-dim", &sizes.head_dim.to_string()]);
    command.args(["--iterations", &arguments.iterations.to_string()]);
    if arguments.json {
        command.arg("--json");
    }
    let status = command.stdin(Stdio::null()).status();
    let status = status.map_err(|error| no_peers(format!("python3 cannot be started ({error})")))?;
    match status.code() {
        Some(0) => Ok(()),
        Some(3) => Err(no_peers(format!("python3 has no PyTorch that sees {} GPUs", sizes.cp_size))),
        _ => Err(CliError::CheckFailed { what: format!("the comparison with PyTorch ended with {status}") }),
    }
}
