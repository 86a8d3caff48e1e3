use std::process::Command;

use serde_json::{Value, json};

use super::sizes::Sizes;
use crate::arguments::{BenchAttentionArguments, BenchPass};
use crate::command::bench_mask::{self as mask, value_name};
use crate::command::pytorch::run_script;
use crate::error::CliError;

/// Times PyTorch's attentions, and this program in between, and prints both in one table.
const SCRIPT: &str = include_str!("../../../../../../benches/peers/attention.py");
/// Figures of a peer that is not part of PyTorch.
const PUBLISHED: &str = include_str!("../../../../../../benches/peers/published.json");

/// Runs the comparison by the machine's own `python3`, which runs this program again for its rows. The script and its data
/// are handed over as text: nothing is written to disk.
pub(super) fn compare(
    peers: &str,
    arguments: &BenchAttentionArguments,
    sizes: &Sizes,
) -> Result<(), CliError> {
    let no_peers = |reason: String| CliError::NoPeers { reason };
    let ours = std::env::current_exe().map_err(|error| no_peers(error.to_string()))?;
    let list = |items: Vec<String>| items.join(",");
    // The script asks for a deterministic backward nowhere: no peer has one to compare.
    let passes = sizes.passes.iter().filter(|pass| **pass != BenchPass::Deterministic);
    let mut command = Command::new("python3");
    command.arg("-").args(["--peers", peers, "--data", &data()?]);
    command.args(["--masks", &list(sizes.masks.iter().map(|name| mask::name(*name)).collect())]);
    command.args(["--seqlens", &list(sizes.seqlens.iter().map(ToString::to_string).collect())]);
    command.args(["--heads", &list(sizes.heads.iter().map(|(q, kv)| format!("{q}:{kv}")).collect())]);
    command.args(["--head-dim", &sizes.head_dim.to_string(), "--dtype", value_name(&sizes.dtype).as_str()]);
    command.args(["--passes", &list(passes.map(value_name).collect())]);
    command.args(["--iterations", &sizes.iterations.to_string(), "--clock", &value_name(&sizes.clock)]);
    command.args(["--kernels", &value_name(&sizes.kernels)]);
    command.arg("--ours").arg(ours);
    if arguments.json {
        command.arg("--json");
    }
    run_script(SCRIPT, vec![command], "python3 has no PyTorch that sees a GPU")
}

/// What the script would read from the files beside it.
fn data() -> Result<String, CliError> {
    let published: Value = serde_json::from_str(PUBLISHED)
        .map_err(|error| CliError::NoPeers { reason: format!("published.json of this build: {error}") })?;
    let documents: serde_json::Map<String, Value> = mask::DOCUMENTS
        .iter()
        .map(|(seqlen, text)| (seqlen.to_string(), json!(mask::lengths(text))))
        .collect();
    Ok(json!({"documents": documents, "published": published}).to_string())
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::arguments::{BenchClock, BenchDType};

    #[test]
    fn the_data_of_the_script_is_whole() {
        let data: Value = serde_json::from_str(&data().unwrap()).unwrap();
        for (seqlen, lengths) in data["documents"].as_object().unwrap() {
            let sum: u64 = lengths.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
            assert_eq!(sum.to_string(), *seqlen);
        }
        assert_eq!(data["documents"].as_object().unwrap().len(), 3);
        assert!(data["published"]["rows"].as_array().unwrap().len() > 80);
        // Arguments longer than this are refused by Linux.
        assert!(data.to_string().len() < 128 << 10);
    }

    /// Both sides must know the same names.
    #[test]
    fn names_are_those_of_the_script() {
        for name in crate::arguments::BenchMask::value_variants() {
            assert!(SCRIPT.contains(&format!("\"{}\"", mask::name(*name))));
        }
        for dtype in BenchDType::value_variants() {
            assert!(SCRIPT.contains(&format!("\"{}\": torch.", value_name(dtype))));
        }
        for clock in BenchClock::value_variants() {
            assert!(SCRIPT.contains(&format!("\"{}\"", value_name(clock))));
        }
    }
}
