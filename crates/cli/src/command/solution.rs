use std::time::Instant;

use counterpoint_exec::available_memory;
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Plan, PlanConfig, PlanSummary};

use crate::error::CliError;

/// A plan and the seconds that solving it took.
#[derive(Debug)]
pub(crate) struct Solution {
    /// The plan.
    pub(crate) plan: Plan,
    /// Seconds of one solve, the only one.
    pub(crate) seconds: f64,
}

impl Solution {
    /// Plans `mask`, all ranks' parts.
    pub(crate) fn solve(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<Self, CliError> {
        refuse_too_many_chunks(mask, config)?;
        let begin = Instant::now();
        let plan = Plan::new(mask, spec, config).map_err(|source| CliError::Plan { source })?;
        Ok(Self { plan, seconds: begin.elapsed().as_secs_f64() })
    }

    /// The plan in figures.
    pub(crate) fn summary(&self, mask: &Mask, spec: &AttentionSpec) -> PlanSummary {
        PlanSummary::new(&self.plan, mask, spec, self.seconds)
    }
}

/// Bytes that planning takes for a chunk, at least: its work, its place in the dispatch, its pieces of bands and of what
/// is exchanged, on both passes.
const BYTES_PER_CHUNK: u64 = 256;

/// A chunk size of 1 on a long sequence is a slip of the pen that would end in the system killing the process.
fn refuse_too_many_chunks(mask: &Mask, config: &PlanConfig) -> Result<(), CliError> {
    let Some((chunk_size, available)) = config.chunk_size.zip(available_memory()) else { return Ok(()) };
    let chunks = mask.seqlen_q().max(mask.seqlen_k()).div_ceil(chunk_size.max(1));
    let needed = BYTES_PER_CHUNK * chunks as u64;
    if needed <= available {
        return Ok(());
    }
    let what = "planning so many chunks";
    Err(CliError::OutOfMemory { what, needed, available, instead: "give a larger --chunk-size" })
}
