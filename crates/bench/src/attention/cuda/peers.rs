//! `bench attention --peers`: cuDNN, FlashAttention and FlexAttention as PyTorch has them, in one table with ours.

use counterpoint_console::CliError;

use super::sizes::Sizes;
use crate::arguments::{BenchAttentionArguments, BenchPass};
use crate::masks::{self, value_name};
use crate::pytorch::{Script, run};

/// Times PyTorch's attentions, and this program in between, and prints both in one table: by a script in the machine's own
/// `python3`, which runs this program again for its rows.
pub(super) fn compare(arguments: &BenchAttentionArguments, sizes: &Sizes) -> Result<(), CliError> {
    let no_peers = |reason: String| CliError::NoPeers { reason };
    let ours = counterpoint_console::program::file().map_err(|error| no_peers(error.to_string()))?;
    let list = |items: Vec<String>| items.join(",");
    // The script asks for a deterministic backward nowhere: no peer has one to compare.
    let passes = sizes.passes.iter().filter(|pass| **pass != BenchPass::Deterministic);
    let script = Script::unpack("attention.py")?;
    let mut command = script.command();
    command.args(["--peers", &arguments.cuda.peers.join(",")]);
    let masks = sizes.masks.iter().filter(|mask| masks::has_peers(**mask));
    command.args(["--masks", &list(masks.map(|mask| mask.name().to_owned()).collect())]);
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
    run(command, "python3 has no PyTorch that sees a GPU")
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::arguments::{BenchClock, BenchDType};
    use crate::pytorch::text_of;

    /// Both sides must know the same names.
    #[test]
    fn names_are_those_of_the_script() {
        let masks = counterpoint_mask::MaskPreset::ALL.into_iter();
        for name in masks.filter(|mask| masks::has_peers(*mask)) {
            assert!(text_of("one_gpu/masks.py").contains(&format!("\"{}\"", name.name())));
        }
        for dtype in BenchDType::value_variants() {
            assert!(text_of("one_gpu/tensors.py").contains(&format!("\"{}\": torch.", value_name(dtype))));
        }
        for clock in BenchClock::value_variants() {
            assert!(text_of("attention.py").contains(&format!("\"{}\"", value_name(clock))));
        }
    }
}
