//! Tables of a Hopper attention backward: its tiles in the order of the queue, and what was chosen for them, made without a GPU.

use counterpoint_tiles::{DqOrder, TileSchedule};
use serde::{Deserialize, Serialize};

use super::scheduler::TileScheduler;
use super::shape::{BackwardShape, DqSums, ItemHeads, blocks_per_head, shape_of};
use super::source::{BackwardChoice, KeyGradients};
use crate::kernel::{AttentionFault, AttentionProblem, BackwardMode};
use crate::{CudaError, DescribedGpu};

/// What the launcher of a problem follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopperBackwardTables {
    pub(super) heads: ItemHeads,
    /// In the queue's order.
    pub(super) schedule: TileSchedule,
    /// Where tiles add to dq in a fixed order.
    pub(super) dq_order: Option<DqOrder>,
    /// Rows that all tiles add to each slab of dq; of at least one slab.
    pub(super) coverage: Vec<u32>,
    /// See [`blocks_per_head`].
    pub(super) blocks_per_head: u32,
    pub(super) scheduler: TileScheduler,
}

impl HopperBackwardTables {
    /// Those of a problem on a GPU.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when the problem is not one that the kernel takes.
    pub fn new(
        gpu: &DescribedGpu,
        problem: &AttentionProblem,
        mode: BackwardMode,
    ) -> Result<Self, CudaError> {
        let AttentionProblem { heads_q, heads_kv, .. } = *problem;
        let shape = shape_for(problem)?;
        if heads_kv == 0 || !heads_q.is_multiple_of(heads_kv) {
            return Err(refused(AttentionFault::Heads { heads_q, heads_kv }));
        }
        let sums = DqSums::of(problem, mode);
        let mut schedule = shape.schedule(problem, sums).map_err(|error| refused(error.into()))?;
        let heads = ItemHeads::of(problem, mode, shape, schedule.tiles());
        let choice = choice_for(problem, mode, shape, heads);
        let dq_order = if problem.deterministic { schedule.dq_order() } else { None };
        let blocks_per_head = blocks_per_head(schedule.tiles(), sums);
        // No buffer is empty.
        let mut coverage = schedule.row_reads(shape.rows as usize);
        coverage.resize(coverage.len().max(1), 0);
        let (rounds, workers) = (rounds(&coverage, heads_q), gpu.workers(problem.sm_margin));
        let scheduler = TileScheduler::of(&mut schedule, &choice, (heads_kv, heads), rounds, workers);
        Ok(Self { heads, schedule, dq_order, coverage, blocks_per_head, scheduler })
    }

    /// What of the kernel is compiled for them.
    pub(super) fn choice(
        &self,
        problem: &AttentionProblem,
        mode: BackwardMode,
    ) -> Result<BackwardChoice, CudaError> {
        Ok(choice_for(problem, mode, shape_for(problem)?, self.heads))
    }

    /// Slabs of dq that some tile adds to, of all query heads.
    pub(super) fn rounds(&self, heads_q: usize) -> u32 {
        rounds(&self.coverage, heads_q)
    }
}

fn rounds(coverage: &[u32], heads_q: usize) -> u32 {
    (coverage.iter().filter(|rows| **rows > 0).count() * heads_q) as u32
}

fn shape_for(problem: &AttentionProblem) -> Result<BackwardShape, CudaError> {
    let AttentionProblem { head_dim, head_dim_v, .. } = *problem;
    shape_of(problem).ok_or_else(|| refused(AttentionFault::HeadDims { head_dim, head_dim_v }))
}

fn choice_for(
    problem: &AttentionProblem,
    mode: BackwardMode,
    shape: BackwardShape,
    heads: ItemHeads,
) -> BackwardChoice {
    BackwardChoice {
        shape,
        element: problem.element,
        gradients: match (mode.rounds_keys, heads.parts) {
            (true, 1) => KeyGradients::Results,
            (true, _) => KeyGradients::Sums,
            (false, _) => KeyGradients::Partials,
        },
        softcap: problem.softcap.is_some(),
        fixed_order: problem.deterministic,
    }
}

fn refused(fault: AttentionFault) -> CudaError {
    CudaError::Launch { kernel: "attention_backward".to_owned(), reason: fault.into() }
}
