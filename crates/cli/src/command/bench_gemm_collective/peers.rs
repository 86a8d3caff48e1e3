use std::process::Command;

use counterpoint_exec::{GemmCollective, GemmCollectiveSpec};
use counterpoint_plan::DType;

use crate::arguments::{BenchGemmCollectiveArguments, Device};
use crate::command::pytorch::{Script, lacks_gpus, on_gpus, run_all};
use crate::error::CliError;

/// Times PyTorch's ways on the same products, in the machine's own `python3`, one process a GPU, after our rows: they need the GPUs.
pub(super) fn run(
    arguments: &BenchGemmCollectiveArguments,
    cases: &[GemmCollectiveSpec],
) -> Result<(), CliError> {
    let no_peers = |reason: String| CliError::NoPeers { reason };
    if arguments.device == Device::Cpu {
        return Err(no_peers("the peers are for GPUs; add --device cuda".to_owned()));
    }
    let script = Script::unpack("gemm_collective.py")?;
    let ranks = arguments.ranks as usize;
    run_all(on_gpus(ranks, || command(&script, arguments, cases))?, &lacks_gpus(ranks))
}

fn command(
    script: &Script,
    arguments: &BenchGemmCollectiveArguments,
    cases: &[GemmCollectiveSpec],
) -> Command {
    let of = |collective: GemmCollective| -> Vec<String> {
        let cases = cases.iter().filter(|case| case.collective == collective);
        cases.map(|case| format!("{}:{}:{}", case.m, case.n, case.k)).collect()
    };
    let chosen = GemmCollective::ALL.map(|collective| (collective.name(), of(collective)));
    let chosen: Vec<_> = chosen.into_iter().filter(|(_, shapes)| !shapes.is_empty()).collect();
    let names_of: Vec<&str> = chosen.iter().map(|(name, _)| *name).collect();
    let shapes: Vec<String> = chosen.iter().map(|(_, shapes)| shapes.join(",")).collect();
    let dtype = match cases.first() {
        Some(GemmCollectiveSpec { dtype: DType::F16, .. }) => "f16",
        _ => "bf16",
    };
    let mut command = script.command();
    command.args(["--peers", &arguments.peers.join(","), "--collectives", &names_of.join(",")]);
    command.args(["--shapes", &shapes.join("/"), "--dtype", dtype]);
    command.args(["--iterations", &arguments.iterations.to_string()]);
    command.args(["--cycles", &arguments.cycles.to_string()]);
    if arguments.json {
        command.arg("--json");
    }
    command
}
