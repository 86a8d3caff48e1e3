//! How the tile scheduler of a backward hands out tiles.

use counterpoint_tiles::{TileClasses, TileCtas, TileSchedule};
use serde::{Deserialize, Serialize};

use super::shape::{CLASSES, ItemHeads, heads_at_a_time, rounds_overlapped};
use super::source::{BackwardChoice, ROWS_THREADS, SHARED_BYTES, THREADS};
use crate::Launch;
use crate::kernel::{AttentionProblem, BackwardMode, blocks_of};

const MISSED_ORDER: &str = "a key tile waited in vain for its turn to add to dq, which is wrong now; run without deterministic mode, \
                           and report this mask";
const MISSED_HALF: &str = "a key tile waited in vain for the other half of its query heads, and its dk and dv are wrong now; run in \
                           deterministic mode, and report this mask";
const MISSED_SLAB: &str = "rows of dq were waited for in vain that a key tile was to add, and dq is wrong now; run in deterministic \
                           mode, and report this mask";

/// How the items of a schedule are handed out to CTAs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TileScheduler {
    pub(super) classes: TileClasses,
    /// How many items the queue has.
    pub(super) items: u32,
    /// See [`rounds_overlapped`].
    pub(super) rounds_overlapped: u32,
    /// See [`heads_at_a_time`].
    pub(super) heads_at_a_time: u32,
    /// CTAs, or clusters of them, that take items.
    pub(super) groups: u32,
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
        let clusters = (workers / choice.shape.ctas()).max(1);
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
        Self {
            items,
            rounds_overlapped: rounds_overlapped(
                schedule,
                (items_of_tile, heads.head_passes),
                clusters as usize,
                rounds,
            ),
            heads_at_a_time: heads_at_a_time(tiles, heads_kv, clusters as usize) as u32,
            groups: items.clamp(1, clusters),
            classes,
        }
    }

    /// The launch of the kernel of `choice`.
    pub(super) fn launch(&self, choice: &BackwardChoice) -> Launch {
        let ctas = choice.shape.ctas();
        Launch::linear(self.groups * ctas, THREADS).cluster([ctas, 1, 1]).shared_bytes(SHARED_BYTES)
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
