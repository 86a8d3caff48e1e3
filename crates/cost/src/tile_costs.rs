//! Seconds of attention kernels by the tiles that their CTAs compute.

use counterpoint_tiles::{MAX_TILE_SIZE, TileCounting, TileCounts, TileDirection};
use serde::{Deserialize, Serialize};

use crate::figure_limits::{COSTS, MOST_WORKERS, check_figure};
use crate::{AttentionWork, CostError};

/// Attention kernels that follow a [`TileSchedule`](counterpoint_tiles::TileSchedule): what a run of theirs costs besides unmasked pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TileCosts {
    /// CTAs that run at a time.
    pub workers: usize,
    /// The forward's kernel.
    pub forward: TileCost,
    /// The backward's.
    pub backward: TileCost,
}

/// What one attention kernel costs by what its CTAs compute. The unit of most figures is a *column*: the time in which a CTA
/// multiplies all rows of its tile with one column of a block. A machine's rate says how long that is, so that these figures
/// are the kernel's, and hold for every GPU that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TileCost {
    /// Rows that a tile owns.
    pub tile_rows: usize,
    /// Columns of a block.
    pub block: usize,
    /// Columns of a block where a state is begun from or left. Otherwise whichever of the two blocks takes less time.
    pub staged_block: usize,
    /// Query heads of one key head that can share a tile, where that takes less time.
    pub pack: usize,
    /// Columns that every block costs besides its own.
    pub block_columns: f64,
    /// Columns more for a block whose mask is tested.
    pub bounded_columns: f64,
    /// Columns for every tile of a head.
    pub tile_columns: f64,
    /// Columns more for a block, where query heads share keys and the tile's blocks begin elsewhere than its neighbour's: the
    /// cache then no longer holds what the neighbour has read.
    pub staggered_columns: f64,
    /// Seconds from a kernel's launch to its first product and from its last one to its end.
    pub start_seconds: f64,
    /// By which part a kernel is slower that runs for long: the clock falls as the GPU warms up.
    pub slowdown: f64,
    /// Seconds of a run at half of that.
    pub slowdown_seconds: f64,
}

/// Blocks of the shortest part of a tile that is split, what a part costs besides its blocks, in tiles, and what merging them costs in all,
/// in columns (as [`TileSplit`](counterpoint_tiles::TileSplit)).
const LEAST_PART: usize = 4;
const PART_TILES: f64 = 2.0;
const MERGE_COLUMNS: f64 = 400.0;

/// Tiles up to so many blocks, most of them alike, are computed in step, so that neighbours read the same rows anyway.
const IN_STEP: usize = 32;

impl TileCosts {
    /// The Hopper kernels on an H200, fitted to kept runs of seven masks of 8k to 32k rows at 16:16 and 64:8 heads
    /// (`benches/runs/2026-11-22-h200-x2-whole`, `-scaling`); each of their figures is within 10 %.
    pub const H200: TileCosts = TileCosts {
        workers: 132,
        forward: TileCost {
            tile_rows: 128,
            block: 176,
            staged_block: 128,
            pack: 8,
            block_columns: 3.2,
            bounded_columns: 76.0,
            tile_columns: 12.5,
            staggered_columns: 0.0,
            start_seconds: 11e-6,
            slowdown: 0.25,
            slowdown_seconds: 14.7e-3,
        },
        backward: TileCost {
            tile_rows: 128,
            block: 64,
            staged_block: 64,
            pack: 1,
            block_columns: 9.0,
            bounded_columns: 57.0,
            tile_columns: 194.0,
            staggered_columns: 3.0,
            start_seconds: 10e-6,
            slowdown: 0.25,
            slowdown_seconds: 8e-3,
        },
    };

    /// Whether times can be predicted with it.
    pub(crate) fn validate(&self) -> Result<(), CostError> {
        check_figure("tiles.workers", self.workers, 1..=MOST_WORKERS)?;
        for kernel in [&self.forward, &self.backward] {
            let sizes = [
                ("tiles.tile_rows", kernel.tile_rows),
                ("tiles.block", kernel.block),
                ("tiles.staged_block", kernel.staged_block),
                ("tiles.pack", kernel.pack),
            ];
            sizes.into_iter().try_for_each(|(field, size)| check_figure(field, size, 1..=MAX_TILE_SIZE))?;
            if kernel.tile_rows % kernel.pack != 0 {
                let (value, wanted) = (kernel.pack.to_string(), "a divisor of tile_rows".to_owned());
                return Err(CostError { field: "tiles.pack", value, wanted });
            }
            let costs = [
                ("tiles.block_columns", kernel.block_columns),
                ("tiles.bounded_columns", kernel.bounded_columns),
                ("tiles.tile_columns", kernel.tile_columns),
                ("tiles.staggered_columns", kernel.staggered_columns),
                ("tiles.start_seconds", kernel.start_seconds),
                ("tiles.slowdown", kernel.slowdown),
                ("tiles.slowdown_seconds", kernel.slowdown_seconds),
            ];
            costs.into_iter().try_for_each(|(field, cost)| check_figure(field, cost, COSTS))?;
        }
        Ok(())
    }
}

impl TileCost {
    /// Seconds of one column, when all workers together compute `flops_per_second` in long tiles of large blocks, at
    /// `pair_flops` operations a pair.
    pub(crate) fn column_seconds(&self, workers: usize, pair_flops: f64, flops_per_second: f64) -> f64 {
        let useful = self.block as f64 / (self.block as f64 + self.block_columns);
        (self.tile_rows * workers) as f64 * pair_flops / flops_per_second * useful
    }

    /// A long run is slower than one that takes `seconds` at the clock of a short one.
    fn sustained(&self, seconds: f64) -> f64 {
        if seconds <= 0.0 {
            return 0.0;
        }
        seconds * (1.0 + self.slowdown * seconds / (seconds + self.slowdown_seconds))
    }

    /// What takes `seconds` at the clock of a short run, after `computed` seconds of the same run.
    fn sustained_after(&self, computed: f64, seconds: f64) -> f64 {
        // The solution of sustained(begun) = computed.
        let half = computed - self.slowdown_seconds;
        let product = (1.0 + self.slowdown) * computed * self.slowdown_seconds;
        let begun = (half + (half * half + 4.0 * product).sqrt()) / (2.0 * (1.0 + self.slowdown));
        self.sustained(begun + seconds) - self.sustained(begun)
    }

    /// Seconds of one pair of one query head in the middle of a large mask, in stages.
    pub fn pair_seconds(&self, pair_flops: f64, flops_per_second: f64) -> f64 {
        let overhead = |block: usize| (block as f64 + self.block_columns) / block as f64;
        pair_flops / flops_per_second * overhead(self.staged_block) / overhead(self.block)
    }

    /// Seconds that all tiles of `rows` rows cost, however little they compute, over `heads` heads.
    pub fn tiles_seconds(
        &self,
        rows: usize,
        heads: usize,
        workers: usize,
        pair_flops: f64,
        flops_per_second: f64,
    ) -> f64 {
        let tiles = (rows * heads) as f64 / self.tile_rows as f64;
        tiles / workers as f64
            * self.tile_columns
            * self.column_seconds(workers, pair_flops, flops_per_second)
    }

    /// Seconds of `work`, without what it costs to launch; `None` when there is no schedule of it.
    pub(crate) fn seconds(
        &self,
        work: &AttentionWork<'_>,
        direction: TileDirection,
        workers: usize,
        pair_flops: f64,
        flops_per_second: f64,
    ) -> Option<f64> {
        let counting = TileCounting::new(work.bands, work.q_rows, work.k_rows, direction).ok()?;
        let (columns, _) = self.least(work, &counting, workers)?;
        Some(self.run_seconds(work, columns, workers, pair_flops, flops_per_second))
    }

    /// Seconds of a run of `work` whose last CTA has computed so many columns.
    pub(crate) fn run_seconds(
        &self,
        work: &AttentionWork<'_>,
        columns: f64,
        workers: usize,
        pair_flops: f64,
        flops_per_second: f64,
    ) -> f64 {
        let seconds = columns * self.column_seconds(workers, pair_flops, flops_per_second);
        self.start_seconds + self.sustained_after(work.computed_seconds, seconds)
    }

    /// Columns until the last of `workers` has finished `work`, in the shape of tiles that has the fewest, and that.
    fn least(
        &self,
        work: &AttentionWork<'_>,
        counting: &TileCounting,
        workers: usize,
    ) -> Option<(f64, TileShape)> {
        let mut least: Option<(f64, TileShape)> = None;
        for shape in self.shapes(work) {
            let columns = self.cta_work(work, counting, shape)?.until_last(workers);
            if least.is_none_or(|(least, _)| columns < least) {
                least = Some((columns, shape));
            }
        }
        least
    }

    /// The shape of tiles that has the fewest columns. The only one is not counted.
    pub(crate) fn least_shape(
        &self,
        work: &AttentionWork<'_>,
        counting: &TileCounting,
        workers: usize,
    ) -> Option<TileShape> {
        let mut shapes = self.shapes(work);
        match (shapes.next(), shapes.next()) {
            (Some(only), None) => Some(only),
            _ => self.least(work, counting, workers).map(|(_, shape)| shape),
        }
    }

    /// The shapes of tiles that `work` may be computed in.
    fn shapes(&self, work: &AttentionWork<'_>) -> impl Iterator<Item = TileShape> + use<> {
        let group = work.heads_q / work.heads_kv.max(1);
        let packs = [Some(1), (self.pack > 1 && group.is_multiple_of(self.pack)).then_some(self.pack)];
        let other = (!work.staged && self.block != self.staged_block).then_some(self.block);
        let blocks = [Some(self.staged_block), other];
        let shape = |pack| move |block| TileShape { pack, block };
        packs.into_iter().flatten().flat_map(move |pack| blocks.into_iter().flatten().map(shape(pack)))
    }

    /// what CTAs compute of `work` in tiles of a shape.
    pub(crate) fn cta_work(
        &self,
        work: &AttentionWork<'_>,
        counting: &TileCounting,
        shape: TileShape,
    ) -> Option<CtaWork> {
        let counts =
            counting.counts_until(self.tile_rows / shape.pack, shape.block, work.interruption).ok()?;
        Some(self.work_of_counts(&counts, work, counting.direction(), shape))
    }

    fn work_of_counts(
        &self,
        counts: &TileCounts,
        work: &AttentionWork<'_>,
        direction: TileDirection,
        TileShape { pack, block }: TileShape,
    ) -> CtaWork {
        let TileCounts { tiles, longest_tile, blocks, bounded_blocks, .. } = *counts;
        let heads = (work.heads_q / pack) as f64;
        // Key tiles of the backward are computed by all query heads of their key head, one after the other.
        let (tile_heads, head_passes) = match direction {
            TileDirection::Forward => (heads, 1.0),
            TileDirection::Backward => (work.heads_kv as f64, heads / work.heads_kv.max(1) as f64),
        };
        let staggered = if work.heads_q > work.heads_kv && self.staggered_columns > 0.0 {
            staggered_blocks(counts) as f64 * self.staggered_columns
        } else {
            0.0
        };
        let block = block as f64 + self.block_columns;
        let columns = blocks as f64 * block + bounded_blocks as f64 * self.bounded_columns + staggered;
        let tiles = tiles as f64 * tile_heads;
        // Forwards that neither begin from a state nor leave one split tiles that are too few for all.
        let may_split = direction == TileDirection::Forward && !work.staged && longest_tile >= 2 * LEAST_PART;
        CtaWork {
            blocks: columns * heads,
            all: columns * heads + tiles * self.tile_columns,
            tiles,
            longest: longest_tile as f64 * block * head_passes + self.tile_columns,
            least_part: may_split.then_some(LEAST_PART as f64 * block),
            part: PART_TILES * self.tile_columns,
        }
    }
}

/// A shape of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    /// Query heads of one key head that share a tile.
    pack: usize,
    /// Columns of a block.
    block: usize,
}

/// What all CTAs compute, in columns.
pub(crate) struct CtaWork {
    /// Blocks alone.
    pub(crate) blocks: f64,
    /// And what tiles cost besides them.
    pub(crate) all: f64,
    /// Number of tiles of all heads.
    tiles: f64,
    /// The tile that takes longest.
    longest: f64,
    /// What the shortest part of a tile is, where tiles can be split.
    least_part: Option<f64>,
    /// What a part costs besides that.
    part: f64,
}

impl CtaWork {
    /// Columns until the last of `workers` has finished. Tiles are taken heaviest first, so whoever is last is half an average
    /// tile behind; and nobody finishes before the longest tile.
    pub(crate) fn until_last(&self, workers: usize) -> f64 {
        let behind = self.all / self.tiles.max(1.0) / 2.0;
        let share = self.all / workers as f64;
        let whole = (share + behind).max(self.longest);
        match self.least_part {
            Some(least) if self.longest > share => whole.min(self.in_parts(share, least)),
            _ => whole,
        }
    }

    /// The same of tiles that are split until the longest part is about everybody's share.
    fn in_parts(&self, share: f64, least: f64) -> f64 {
        let part = share.max(least);
        let parts = (self.blocks / part).max(self.tiles);
        // Those of the workers that have one more than others.
        (share * (1.0 + self.part * parts / self.all.max(1.0)) + part / 4.0).max(part + self.part)
            + MERGE_COLUMNS
    }
}

/// Blocks of tiles that begin elsewhere than the tile before them in the order of rows.
fn staggered_blocks(counts: &TileCounts) -> u64 {
    let most = counts.longest_tile;
    let alike = counts.alike.iter().filter(|tiles| tiles.blocks * 10 >= most * 7);
    if most <= IN_STEP && 2 * alike.map(|tiles| tiles.count).sum::<usize>() > counts.tiles {
        return 0;
    }
    let begins = counts.alike.iter().filter_map(|tiles| Some((tiles.begin?, tiles.blocks)));
    let staggered = begins.clone().zip(begins.skip(1)).filter(|(before, tiles)| before.0 != tiles.0);
    staggered.map(|(_, tiles)| tiles.1 as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_in_parts_is_as_slow_as_in_one() {
        for tile in [TileCosts::H200.forward, TileCosts::H200.backward] {
            let whole = tile.sustained_after(0.0, 9e-3);
            assert!((whole - tile.sustained(9e-3)).abs() < 1e-12);
            let first = tile.sustained_after(0.0, 2e-3);
            let rest = tile.sustained_after(first, 7e-3);
            assert!((first + rest - whole).abs() < 1e-12, "{first} {rest} {whole}");
            // What comes later is slower.
            assert!(tile.sustained_after(whole, 2e-3) > 1.01 * first);
        }
    }
}
