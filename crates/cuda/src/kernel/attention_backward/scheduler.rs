//! Which kernel a backward takes, and how its tile scheduler hands out tiles.

use counterpoint_tiles::{TileClasses, TileCtas, TileSchedule};

use super::shape::{CLASSES, DqSums, ItemHeads, heads_at_a_time, rounds_overlapped, shape_of};
use super::source::{BackwardChoice, KeyGradients, ROWS_THREADS, SHARED_BYTES, THREADS};
use crate::kernel::{AttentionFault, AttentionProblem, BackwardMode, blocks_of};
use crate::{CudaError, Launch};

const MISSED_ORDER: &str = "a key tile waited in vain for its turn to add to dq, which is wrong now; run without deterministic mode, \
                           and report this mask";
const MISSED_HALF: &str = "a key tile waited in vain for the other half of its query heads, and its dk and dv are wrong now; run in \
                           deterministic mode, and report this mask";
const MISSED_SLAB: &str = "rows of dq were waited for in vain that a key tile was to add, and dq is wrong now; run in deterministic \
                           mode, and report this mask";

/// The kernel that a problem takes, and what its tiles are.
pub(super) struct Choice {
    pub(super) choice: BackwardChoice,
    pub(super) sums: DqSums,
    pub(super) heads: ItemHeads,
    pub(super) schedule: TileSchedule,
}

impl Choice {
    pub(super) fn of(problem: &AttentionProblem, mode: BackwardMode) -> Result<Self, CudaError> {
        let AttentionProblem { heads_q, heads_kv, head_dim, head_dim_v, .. } = *problem;
        let shape =
            shape_of(problem).ok_or_else(|| refused(AttentionFault::HeadDims { head_dim, head_dim_v }))?;
        if heads_kv == 0 || !heads_q.is_multiple_of(heads_kv) {
            return Err(refused(AttentionFault::Heads { heads_q, heads_kv }));
        }
        let sums = DqSums::of(problem, mode);
        let schedule = shape.schedule(problem, sums).map_err(|error| refused(error.into()))?;
        let heads = ItemHeads::of(problem, mode, shape, schedule.tiles());
        let choice = BackwardChoice {
            shape,
            element: problem.element,
            gradients: match (mode.rounds_keys, heads.parts) {
                (true, 1) => KeyGradients::Results,
                (true, _) => KeyGradients::Sums,
                (false, _) => KeyGradients::Partials,
            },
            softcap: problem.softcap.is_some(),
            fixed_order: problem.deterministic,
        };
        Ok(Self { choice, sums, heads, schedule })
    }
}

/// How the items of a schedule are handed out to CTAs.
pub(super) struct TileScheduler {
    pub(super) classes: TileClasses,
    /// How many items the queue has.
    pub(super) items: u32,
    /// See [`rounds_overlapped`].
    pub(super) rounds_overlapped: u32,
    /// See [`heads_at_a_time`].
    pub(super) heads_at_a_time: u32,
    pub(super) launch: Launch,
}

impl TileScheduler {
    /// Puts the schedule's tiles in the order in which so many workers take them; `rounds` slabs of dq are rounded meanwhile.
    pub(super) fn of(
        schedule: &mut TileSchedule,
        choice: &BackwardChoice,
        (heads_kv, heads): (usize, ItemHeads),
        rounds: u32,
        workers: u32,
    ) -> Self {
        let ctas = choice.shape.ctas();
        let clusters = (workers / ctas).max(1);
        let queue = TileCtas {
            workers: clusters as usize,
            heads: heads_kv * heads.parts,
            head_passes: heads.head_passes,
            half_heads: choice.half_heads(),
        };
        let classes = schedule.classes(queue, CLASSES);
        let items_of_tile = heads_kv * heads.parts;
        let tiles = schedule.tiles().len();
        let items = (tiles as u32 + classes.halved_tiles()).saturating_mul(items_of_tile as u32);
        let groups = items.clamp(1, clusters);
        Self {
            items,
            rounds_overlapped: rounds_overlapped(
                schedule,
                (items_of_tile, heads.head_passes),
                clusters as usize,
                rounds,
            ),
            heads_at_a_time: heads_at_a_time(tiles, heads_kv, clusters as usize) as u32,
            launch: Launch::linear(groups * ctas, THREADS).cluster([ctas, 1, 1]).shared_bytes(SHARED_BYTES),
            classes,
        }
    }
}

/// The launch before the kernel's: of rows alone, or of the elements of dq that it sets to zero as well.
pub(super) fn rows_launch(problem: &AttentionProblem, clears: bool, workers: u32) -> Launch {
    let AttentionProblem { rows_q, heads_q, head_dim, .. } = *problem;
    let quads = (rows_q * heads_q) as u64 * if clears { head_dim as u64 / 4 } else { 1 };
    Launch::linear(blocks_of(quads.div_ceil(u64::from(ROWS_THREADS)), workers), ROWS_THREADS)
}

/// What is said where a CTA never did what another waited for; `None` where nobody waits.
pub(super) fn missed(is_ordered: bool, halved_tiles: usize, mode: BackwardMode) -> Option<&'static str> {
    match (is_ordered, halved_tiles) {
        (true, _) => Some(MISSED_ORDER),
        (false, 0) if !mode.rounds_queries => None,
        (false, 0) => Some(MISSED_SLAB),
        (false, _) => Some(MISSED_HALF),
    }
}

fn refused(fault: AttentionFault) -> CudaError {
    CudaError::Launch { kernel: "attention_backward".to_owned(), reason: fault.into() }
}
