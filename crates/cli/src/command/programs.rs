//! `counterpoint plan --program`: the operations that the ranks of a plan run.

use std::fmt::Write;
use std::ops::Range;

use counterpoint_console::{CliError, FlagFault};
use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, PassPolicies, lower_attention_backward, lower_attention_forward,
};

/// The ranks to print: `rank`, or all of them.
pub(super) fn ranks(rank: Option<usize>, cp_size: usize) -> Result<Range<usize>, CliError> {
    match rank {
        None => Ok(0..cp_size),
        Some(rank) if rank < cp_size => Ok(rank..rank + 1),
        Some(rank) => Err(CliError::flag("--program", rank.to_string(), FlagFault::NoRank { cp_size })),
    }
}

/// The forward and the backward of each rank, by these policies.
pub(super) fn text(plan: &Plan, spec: &AttentionSpec, policies: PassPolicies, ranks: Range<usize>) -> String {
    let (blocks, reduction) = (KeyBlocks::default(), GradientReduction::default());
    let mut out = String::new();
    for rank in ranks {
        if !out.is_empty() {
            out.push('\n');
        }
        let _ = writeln!(out, "{}", lower_attention_forward(plan, rank, spec, policies.forward, blocks));
        let _ = write!(out, "{}", lower_attention_backward(plan, rank, spec, policies.backward, reduction));
    }
    out
}
