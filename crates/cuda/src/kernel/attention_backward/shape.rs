//! Tiles of the Hopper attention backward: which kernel has a head size, how tiles are ordered, how dq is summed.

use std::collections::HashSet;

use counterpoint_tiles::{
    Tile, TileDirection, TileOrder, TilePlacement, TileSchedule, TileScheduleConfig, TileScheduleError,
};
use serde::{Deserialize, Serialize};

use crate::kernel::{AttentionProblem, BackwardMode};

/// Classes of tiles that the kernel knows (`kItemClasses`).
pub(super) const CLASSES: usize = 16;

/// Blocks that one query head of a key head computes before the next one computes the same: few enough that what a tile's
/// neighbours read is still in the second level cache, many enough that a neighbour some blocks behind finds it there too.
const BLOCKS_PER_HEAD: u32 = 8;
/// Where tiles have no more blocks, all that their neighbours read of one head is in the cache anyway.
const MOST_BLOCKS_PER_HEAD: u32 = 32;

/// Items that each CTA has of the key heads that it works on at a time, where the order of additions is fixed: fewer, and CTAs wait at the
/// beginning and at the end of each group of heads; more, and what tiles of one head share leaves the second level cache.
const ITEMS_AT_A_TIME: usize = 7;

/// The work of a tile: its keys in shared memory, blocks of query rows that pass by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackwardShape {
    /// Elements of a head in shared memory, the rest of which is zeros.
    pub(super) head_dim: u32,
    /// The same of v, dout and dv.
    pub(super) head_dim_v: u32,
    /// Query rows of a block.
    pub(super) rows: u32,
    /// Who owns the tile's keys.
    pub(super) owners: KeyOwners,
}

/// Who owns the 64 keys of either half of a tile, and so holds their dk and dv.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyOwners {
    /// A warpgroup each, of one CTA: `attention/attention_backward.cuh`.
    Warpgroups,
    /// A CTA each, of a cluster of two, because dk and dv need all accumulators of two warpgroups:
    /// `attention/attention_backward_pair.cuh`.
    Ctas,
}

/// Which key tiles' partial sums make up a row of dq, and in which order they are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DqSums {
    /// Whichever suit the mask, as they come.
    AsTheyCome,
    /// The same in every run: tiles suit the mask, and add in a fixed order.
    InOrder,
    /// The same for any number of stages: tiles also begin at multiples of their size, where stages are cut.
    AcrossStages,
}

impl DqSums {
    /// What a problem asks for. A backward that rounds dk and dv has no other stage, nor would it have for any other number of
    /// stages: no rank receives keys.
    pub(super) fn of(problem: &AttentionProblem, mode: BackwardMode) -> Self {
        match (problem.deterministic, mode.rounds_keys) {
            (false, _) => Self::AsTheyCome,
            (true, true) => Self::InOrder,
            (true, false) => Self::AcrossStages,
        }
    }
}

/// Blocks that tiles have in the mean where an item is one query head of several: with fewer, what an item costs besides its blocks (some
/// 30 us on an H100) outweighs what the cache saves.
const LONG_TILES: u64 = 96;

/// The shape of the kernel that takes a problem's heads; `None` where none does.
pub(super) fn shape_of(problem: &AttentionProblem) -> Option<BackwardShape> {
    let AttentionProblem { head_dim, head_dim_v, softcap, .. } = *problem;
    let whole = head_dim.is_multiple_of(8) && head_dim_v.is_multiple_of(8) && head_dim > 0 && head_dim_v > 0;
    BackwardShape::of(head_dim, head_dim_v, softcap.is_some()).filter(|_| whole)
}

/// How the query heads of a key head are shared out among the items of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ItemHeads {
    /// Items of a tile and a key head.
    pub(super) parts: usize,
    /// Query heads of an item, one after the other.
    pub(super) head_passes: usize,
}

impl ItemHeads {
    /// CTAs whose tiles have as many blocks compute all heads in step and read the same rows at a time. Where tiles differ they drift apart,
    /// over the rows of all heads, whose q, dout and f32 dq of 16k rows are 128 MB; those of one head are 16 MB, and in the second level
    /// cache.
    pub(super) fn of(
        problem: &AttentionProblem,
        mode: BackwardMode,
        shape: BackwardShape,
        tiles: &[Tile],
    ) -> Self {
        let group = problem.heads_q / problem.heads_kv.max(1);
        let blocks: u64 = tiles.iter().map(|tile| u64::from(tile.blocks)).sum();
        let is_long = blocks >= LONG_TILES * tiles.len() as u64;
        let lengths: HashSet<u32> = tiles.iter().map(|tile| tile.blocks).collect();
        let is_uneven = 2 * lengths.len() > tiles.len();
        let is_plain = problem.softcap.is_none() && !problem.deterministic;
        let has_kernel = is_plain && mode.rounds_keys && shape.head_dim == 128;
        match has_kernel && is_long && is_uneven {
            true => Self { parts: group, head_passes: 1 },
            false => Self { parts: 1, head_passes: group },
        }
    }
}

/// Slabs of dq that a CTA without work rounds in the time of so many blocks (H200, at memory speed and all at a time).
const IDLE_SLABS: (u64, u64) = (5, 4);
/// With more items, how they end on so many CTAs is nothing to look for.
const MOST_ITEMS: usize = 1 << 14;

impl BackwardShape {
    /// Keys of a tile.
    pub(super) const KEYS: u32 = 128;
    /// Sizes of heads (of q and k, of v) that there are kernels for.
    pub(super) const HEADS: [(usize, usize); 5] = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)];

    /// The shape for a problem; `None` for heads that do not fit the registers.
    pub(super) fn of(head_dim: usize, head_dim_v: usize, softcap: bool) -> Option<Self> {
        let (held, held_v) =
            Self::HEADS.into_iter().find(|&(held, held_v)| head_dim <= held && head_dim_v <= held_v)?;
        Some(Self {
            head_dim: held as u32,
            head_dim_v: held_v as u32,
            rows: if held == 64 && !softcap { 128 } else { 64 },
            owners: if held > 128 { KeyOwners::Ctas } else { KeyOwners::Warpgroups },
        })
    }

    /// CTAs of a tile: one, or a cluster.
    pub(super) const fn ctas(self) -> u32 {
        match self.owners {
            KeyOwners::Warpgroups => 1,
            KeyOwners::Ctas => 2,
        }
    }

    /// Keys that the copy engine fetches at a time: those of a CTA.
    pub(super) const fn key_box(self) -> u32 {
        Self::KEYS / self.ctas()
    }

    /// Query rows that the copy engine fetches at a time: two CTAs fetch half a block each, for both.
    pub(super) const fn row_box(self) -> u32 {
        self.rows / self.ctas()
    }

    /// The work of all CTAs. Where partial sums of dq are added in a fixed order, blocks touch at multiples of their size.
    pub(super) fn schedule(
        self,
        problem: &AttentionProblem,
        sums: DqSums,
    ) -> Result<TileSchedule, TileScheduleError> {
        let fast = TileScheduleConfig::new(TileDirection::Backward, Self::KEYS as usize, self.rows as usize);
        let (blocks, order) = (TilePlacement::Aligned, TileOrder::Chains);
        let config = match sums {
            DqSums::AsTheyCome => fast,
            DqSums::InOrder => TileScheduleConfig { blocks, order, ..fast },
            DqSums::AcrossStages => {
                TileScheduleConfig { tiles: TilePlacement::Aligned, blocks, order, ..fast }
            }
        };
        let arrival = (problem.rows_arriving > 0).then(|| problem.rows_k - problem.rows_arriving);
        let config = TileScheduleConfig { arrival, ..config };
        TileSchedule::new(&problem.bands, problem.rows_q, problem.rows_k, &config)
    }
}

/// Blocks that one query head computes before the next: all, where tiles are short and most as long as the longest (a window),
/// so that neighbours go in step. dk and dv of a group of query heads are summed in that order, so it is fixed where they must be the
/// same for any number of stages.
pub(super) fn blocks_per_head(tiles: &[Tile], sums: DqSums) -> u32 {
    if sums == DqSums::AcrossStages {
        return BLOCKS_PER_HEAD;
    }
    let most = tiles.iter().map(|tile| tile.blocks).max().unwrap_or(0);
    let alike = tiles.iter().filter(|tile| u64::from(tile.blocks) * 10 >= u64::from(most) * 7).count();
    if most <= MOST_BLOCKS_PER_HEAD && 2 * alike > tiles.len() { most.max(1) } else { BLOCKS_PER_HEAD }
}

/// Key heads whose tiles CTAs take together where the order of additions to dq is fixed, out of `heads_kv` of so many `tiles` each.
pub(super) fn heads_at_a_time(tiles: usize, heads_kv: usize, workers: usize) -> usize {
    let groups = heads_kv * tiles / (ITEMS_AT_A_TIME * workers.max(1));
    heads_kv.div_ceil(groups.clamp(1, heads_kv.max(1)))
}

/// How many of `rounds` slabs of dq are rounded concurrently with other work, which that slows: those for which CTAs have no time that run
/// out of work before the last one. (heads_kv, query heads of each) are handed out to so many `workers`.
pub(super) fn rounds_overlapped(
    schedule: &TileSchedule,
    (heads_kv, group): (usize, usize),
    workers: usize,
    rounds: u32,
) -> u32 {
    if workers == 0 || schedule.tiles().len() * heads_kv > MOST_ITEMS {
        return rounds;
    }
    let end = schedule.makespan(workers, heads_kv);
    let idle_columns = (end * workers as u64).saturating_sub(schedule.makespan(1, heads_kv)) * group as u64;
    let idle_blocks = idle_columns / schedule.config().block as u64;
    u64::from(rounds).saturating_sub(idle_blocks * IDLE_SLABS.0 / IDLE_SLABS.1) as u32
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;
    use counterpoint_mask::Mask;
    use counterpoint_tiles::TileCtas;

    use super::*;
    use crate::kernel::{DqBegin, ElementType};

    fn tiles(blocks: impl IntoIterator<Item = u32>) -> Vec<Tile> {
        blocks.into_iter().map(|blocks| Tile { blocks, ..Tile::zeroed() }).collect()
    }

    fn small_problem() -> AttentionProblem {
        AttentionProblem {
            rows_q: 1,
            rows_arriving: 0,
            rows_k: 1,
            heads_q: 1,
            heads_kv: 1,
            head_dim: 128,
            head_dim_v: 128,
            element: ElementType::Bf16,
            bands: Vec::new().into(),
            scale: 1.0,
            softcap: None,
            sm_margin: 0,
            deterministic: false,
        }
    }

    #[test]
    fn heads_compute_short_tiles_alone_where_all_are_alike() {
        assert_eq!(blocks_per_head(&tiles([18, 18, 18, 5]), DqSums::AsTheyCome), 18);
        assert_eq!(blocks_per_head(&tiles([18, 12, 8, 5]), DqSums::AsTheyCome), BLOCKS_PER_HEAD);
        assert_eq!(blocks_per_head(&tiles([128; 9]), DqSums::AsTheyCome), BLOCKS_PER_HEAD);
        assert_eq!(blocks_per_head(&tiles([0]), DqSums::AsTheyCome), 1);
        assert_eq!(blocks_per_head(&[], DqSums::AsTheyCome), BLOCKS_PER_HEAD);
        assert_eq!(blocks_per_head(&tiles([18, 18, 18, 5]), DqSums::AcrossStages), BLOCKS_PER_HEAD);
    }

    #[test]
    fn long_tiles_of_many_lengths_are_shared_out_by_query_heads() {
        let shape = BackwardShape::of(128, 128, false).unwrap();
        let mode = |rounds_keys| BackwardMode { dq: DqBegin::Anything, rounds_queries: true, rounds_keys };
        let parts = |text: &str, mode: BackwardMode, change: fn(&mut AttentionProblem)| {
            let mask: Mask = text.parse().unwrap();
            let (rows_q, rows_k) = (mask.seqlen_q(), mask.seqlen_k());
            let bands = mask.bands().collect::<Vec<_>>().into();
            let mut problem =
                AttentionProblem { rows_q, rows_k, bands, heads_q: 64, heads_kv: 8, ..small_problem() };
            change(&mut problem);
            let schedule = shape.schedule(&problem, DqSums::AsTheyCome).unwrap();
            let heads = ItemHeads::of(&problem, mode, shape, schedule.tiles());
            assert_eq!(heads.parts * heads.head_passes, problem.heads_q / problem.heads_kv);
            heads.parts
        };
        assert_eq!(parts("causal:16k", mode(true), |_| ()), 8);
        // Short, even, in partial sums, in a fixed order, with a softcap, and with one query head of a key head.
        assert_eq!(parts("causal:8k", mode(true), |_| ()), 1);
        assert_eq!(parts("full:16k", mode(true), |_| ()), 1);
        assert_eq!(parts("causal:16k", mode(false), |_| ()), 1);
        assert_eq!(parts("causal:16k", mode(true), |problem| problem.deterministic = true), 1);
        assert_eq!(parts("causal:16k", mode(true), |problem| problem.softcap = Some(30.0)), 1);
        assert_eq!(parts("causal:16k", mode(true), |problem| problem.heads_kv = 64), 1);
    }

    #[test]
    fn ctas_that_end_early_round_what_they_can() {
        let shape = BackwardShape::of(128, 128, false).unwrap();
        let schedule = |text: &str| {
            let mask: Mask = text.parse().unwrap();
            let (rows_q, rows_k) = (mask.seqlen_q(), mask.seqlen_k());
            let bands = mask.bands().collect::<Vec<_>>().into();
            let problem = AttentionProblem { rows_q, rows_k, bands, ..small_problem() };
            shape.schedule(&problem, DqSums::AsTheyCome).unwrap()
        };
        // 1024 items of 132 CTAs: 4 % of them have one less to do than others, 128 blocks each.
        let full = schedule("full:8192");
        assert_eq!(rounds_overlapped(&full, (16, 1), 132, 2048), 0);
        // As many items as CTAs: nobody ends early.
        assert_eq!(rounds_overlapped(&full, (16, 1), 128, 2048), 2048);
        assert_eq!(rounds_overlapped(&full, (16, 1), 1, 7), 7);
        // One item more than CTAs: all but one wait for 2 blocks of 2 heads and 160 columns, that is 4 + 5 blocks.
        let short = schedule("full:128");
        assert_eq!(rounds_overlapped(&short, (133, 2), 132, 4096), 4096 - 131 * 9 * 5 / 4);
        let none = schedule("varlen-full:lengths=64");
        assert_eq!(rounds_overlapped(&none, (1 << 15, 1), 132, 9), 9);
    }

    #[test]
    fn few_heads_of_many_tiles_at_a_time() {
        let of_tiles = [64, 131, 258, 8192].map(|tiles| heads_at_a_time(tiles, 16, 132));
        assert_eq!(of_tiles, [16, 8, 4, 1]);
        assert_eq!(heads_at_a_time(300, 9, 132), 5);
        assert_eq!(heads_at_a_time(0, 8, 0), 8);
    }

    #[test]
    fn documents_are_classes_of_their_own() {
        let shape = BackwardShape::of(128, 128, false).unwrap();
        let lengths =
            [102, 1003, 419, 356, 130, 895, 108, 1718, 1139, 2048, 81, 87, 27, 43, 24, 5, 1, 3, 2, 1];
        let lengths = lengths.map(|length: u32| length.to_string()).join(",");
        let mask: Mask = format!("varlen-causal:lengths={lengths}").parse().unwrap();
        for rows_arriving in [0, 3000] {
            let problem = AttentionProblem {
                rows_q: 8192,
                rows_arriving,
                rows_k: 8192,
                heads_q: 64,
                heads_kv: 8,
                bands: mask.bands().collect::<Vec<_>>().into(),
                ..small_problem()
            };
            let mut schedule = shape.schedule(&problem, DqSums::AsTheyCome).unwrap();
            let ctas = TileCtas { workers: 132, heads: 8, head_passes: 8, half_heads: false };
            let ends = schedule.classes(ctas, CLASSES).ends;
            let count = schedule.tiles().len() as u32;
            assert!(
                ends.len() <= CLASSES && ends.is_sorted_by(|a, b| a < b) && ends.last() == Some(&count),
                "{ends:?}"
            );
            if rows_arriving > 0 {
                // As many as CTAs begin with.
                let first = &schedule.tiles()[..132 / 8 + 1];
                assert!(first.iter().all(|tile| tile.end <= 8192 - 3000), "{ends:?}");
            } else {
                // The longest document's, but for the light ones.
                let first = &schedule.tiles()[..ends[0] as usize];
                assert!(first.len() >= 8 && first.iter().all(|tile| (5870..7918).contains(&tile.start)));
            }
        }
    }

    #[test]
    fn only_what_stages_share_is_cut_where_they_are() {
        let mode = |rounds_keys| BackwardMode { dq: DqBegin::Anything, rounds_queries: true, rounds_keys };
        let mask: Mask = "varlen-full:lengths=100,300".parse().unwrap();
        let mut problem = AttentionProblem {
            rows_q: 400,
            rows_k: 400,
            bands: mask.bands().collect::<Vec<_>>().into(),
            ..small_problem()
        };
        assert_eq!(DqSums::of(&problem, mode(true)), DqSums::AsTheyCome);
        problem.deterministic = true;
        assert_eq!(DqSums::of(&problem, mode(true)), DqSums::InOrder);
        assert_eq!(DqSums::of(&problem, mode(false)), DqSums::AcrossStages);
        let shape = BackwardShape::of(128, 128, false).unwrap();
        let starts = |sums| {
            let schedule = shape.schedule(&problem, sums).unwrap();
            let mut starts: Vec<i32> = schedule.tiles().iter().map(|tile| tile.start).collect();
            starts.sort_unstable();
            (starts, schedule.dq_order().is_some())
        };
        assert_eq!(starts(DqSums::AcrossStages), (vec![0, 128, 256, 384], true));
        assert_eq!(starts(DqSums::InOrder), (vec![0, 100, 144, 272], true));
        assert_eq!(starts(DqSums::AsTheyCome), (vec![0, 100, 144, 272], false));
    }

    #[test]
    fn heads_take_the_smallest_kernel_that_holds_them() {
        let held = |head_dim, head_dim_v| {
            BackwardShape::of(head_dim, head_dim_v, false)
                .map(|shape| (shape.head_dim, shape.head_dim_v, shape.ctas()))
        };
        assert_eq!(held(96, 64), Some((128, 128, 1)));
        assert_eq!(held(136, 128), Some((192, 128, 2)));
        assert_eq!(held(128, 136), Some((192, 192, 2)));
        assert_eq!(held(200, 64), Some((256, 256, 2)));
        assert_eq!(held(256, 264), None);
        assert_eq!(BackwardShape::of(96, 64, false), BackwardShape::of(128, 128, true));
    }
}
