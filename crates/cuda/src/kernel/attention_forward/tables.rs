//! Tables of a Hopper attention forward: the shape and the tiles that were chosen for a problem, made without a GPU.

use serde::{Deserialize, Serialize};

use counterpoint_tiles::TileSchedule;

use super::shape::{self, ForwardShape, Freedom, TileEnds};
use super::source::{ForwardChoice, Scores, Span};
use crate::kernel::{AttentionFault, AttentionProblem, ForwardMode, ForwardModeEnd, portable_shape};
use crate::{CudaError, DescribedGpu};

/// What the launcher of a problem follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopperForwardTables {
    pub(super) shape: ForwardShape,
    pub(super) schedule: TileSchedule,
    /// Tiles that need no row that arrives, and the others.
    pub(super) tiles: [ForwardTiles; 2],
    /// CTAs that run at a time.
    pub(super) workers: u32,
}

/// `ForwardTiles` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(C)]
pub(super) struct ForwardTiles {
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) grouped: u32,
    pub(super) heads_per_group: u32,
}

impl HopperForwardTables {
    /// Those of a problem on a GPU.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when the problem is not one that the kernel takes.
    pub fn new(gpu: &DescribedGpu, problem: &AttentionProblem, mode: ForwardMode) -> Result<Self, CudaError> {
        let refused = |fault: AttentionFault| CudaError::Launch {
            kernel: "attention_forward".to_owned(),
            reason: fault.into(),
        };
        let dims = check(problem).map_err(refused)?;
        let workers = gpu.workers(problem.sm_margin);
        let ends = ends_of(mode);
        // What others merge has the same bits whatever multiprocessors a policy leaves.
        let splitters = if ends == TileEnds::Partials { gpu.sm_count } else { workers };
        let freedom = freedom_of(problem, mode);
        let (shape, schedule) =
            shape::choose(problem, dims, freedom, splitters, ends).map_err(|error| refused(error.into()))?;
        let (ready, waiting) = schedule.tiles().split_at(schedule.ready_tiles());
        let tiles = [(0, ready), (ready.len(), waiting)].map(|(first, tiles)| {
            let groups = shape::head_groups(problem, shape, &schedule, tiles, workers);
            ForwardTiles {
                first: first as u32,
                count: tiles.len() as u32,
                grouped: groups.tiles as u32,
                heads_per_group: groups.heads as u32,
            }
        });
        Ok(Self { shape, schedule, tiles, workers })
    }

    /// What of the kernel is compiled for them.
    pub(super) fn choice(&self, problem: &AttentionProblem, mode: ForwardMode) -> ForwardChoice {
        let span = if freedom_of(problem, mode) == Freedom::Any { Span::Whole } else { Span::Staged };
        ForwardChoice::new(self.shape, problem.element, span, Scores::of(problem))
            .with_max_logits(mode.max_logits)
    }
}

/// Whether it begins with no state and leaves none.
fn is_whole(mode: ForwardMode) -> bool {
    !mode.continues && mode.end != ForwardModeEnd::State
}

fn ends_of(mode: ForwardMode) -> TileEnds {
    match mode.end {
        _ if !is_whole(mode) => TileEnds::States,
        ForwardModeEnd::Partial => TileEnds::Partials,
        _ => TileEnds::Results,
    }
}

fn freedom_of(problem: &AttentionProblem, mode: ForwardMode) -> Freedom {
    match Scores::of(problem) {
        Scores::Transformed => Freedom::SmallUnpacked,
        Scores::Scaled if is_whole(mode) => Freedom::Any,
        Scores::Scaled => Freedom::Small,
    }
}

/// The padded dimensions of a problem, or why it has no kernel.
fn check(problem: &AttentionProblem) -> Result<(u32, u32), AttentionFault> {
    portable_shape::check(problem)?;
    let AttentionProblem { heads_q, head_dim, head_dim_v, rows_q, .. } = *problem;
    // Items, a tile of one head each, are counted by 32 bits.
    if (rows_q as u64).saturating_mul(heads_q as u64) > u64::from(u32::MAX / 4) {
        return Err(AttentionFault::Rows { rows: rows_q, heads: heads_q, most: u32::MAX / 4 });
    }
    portable_shape::padded_dims(head_dim, head_dim_v)
}
