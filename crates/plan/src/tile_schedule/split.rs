//! Splitting tiles along the walked axis.

use super::{TILE_COST, Tile, TileBound, TileMerge, TileRun, TileSplit};

/// A part of fewer blocks would wait for its first block longer than it computes.
const LEAST_PART: usize = 4;

/// What a part costs besides its blocks, in columns: what a tile costs, and writing and merging an f32 result.
const PART_COST: u64 = 2 * TILE_COST;

/// What merging costs in all, in columns: the launch of one more kernel.
const MERGE_COST: u64 = 400;

/// The most blocks of a part when splitting pays. `None` when it does not.
pub(super) fn part_blocks(tiles: &[Tile], block: usize, split: &TileSplit) -> Option<usize> {
    let mut blocks: Vec<usize> =
        tiles.iter().map(|tile| tile.blocks as usize).filter(|&blocks| blocks > 0).collect();
    blocks.sort_unstable_by(|a, b| b.cmp(a));
    let longest = *blocks.first()?;
    // What every worker has to do when all finish together.
    let share = (blocks.iter().sum::<usize>() * split.heads).div_ceil(split.workers);
    if longest < 2 * LEAST_PART || longest <= share {
        return None;
    }
    let makespan = |part: usize| makespan(&blocks, block, split, part);
    let most = (longest / LEAST_PART).min(2 * longest.div_ceil(share) + 2);
    let choices: Vec<(u64, usize)> =
        (2..=most).map(|parts| longest.div_ceil(parts)).map(|part| (makespan(part), part)).collect();
    let (least, _) = *choices.iter().min()?;
    // Partial results take memory and merging, so a little time is no reason for more parts.
    let (found, part) = *choices.iter().find(|&&(found, _)| found <= least + least / 16)?;
    (found + MERGE_COST < makespan(longest)).then_some(part)
}

/// A lower bound, in columns, of the time until all workers have finished, which handing out the longest first comes close
/// to. `blocks` are those of every tile; tiles of more than `part` blocks are split into equal parts.
fn makespan(blocks: &[usize], block: usize, split: &TileSplit, part: usize) -> u64 {
    let columns = |blocks: usize| (blocks * block) as u64;
    let mut costs: Vec<(u64, usize)> = blocks
        .iter()
        .map(|&blocks| match blocks.div_ceil(part) {
            1 => (columns(blocks) + TILE_COST, split.heads),
            parts => (columns(blocks.div_ceil(parts)) + PART_COST, parts * split.heads),
        })
        .collect();
    costs.sort_unstable_by(|a, b| b.cmp(a));
    let work: u64 = costs.iter().map(|&(cost, items)| cost * items as u64).sum();
    let mut bound = work.div_ceil(split.workers as u64);
    // Of the `waves * workers + 1` longest items some worker gets `waves + 1`.
    let (mut before, mut waves) = (0, 0);
    for (cost, items) in costs {
        while waves * split.workers < before + items {
            bound = bound.max((waves as u64 + 1) * cost);
            waves += 1;
        }
        before += items;
    }
    bound
}

/// Tiles in parts, with new runs and bounds.
#[derive(Debug, Default)]
pub(super) struct Parts {
    pub(super) tiles: Vec<Tile>,
    pub(super) runs: Vec<TileRun>,
    pub(super) bounds: Vec<TileBound>,
    pub(super) merges: Vec<TileMerge>,
    /// Partial results in all.
    pub(super) slots: u32,
}

impl Parts {
    /// Splits every tile of more than `part` blocks into as few parts of equal blocks as have no more than that.
    pub(super) fn new(
        tiles: &[Tile],
        runs: &[TileRun],
        bounds: &[TileBound],
        block: usize,
        part: usize,
        clip: impl Fn(&TileBound, &TileRun) -> Option<TileBound>,
    ) -> Self {
        let mut split = Self::default();
        for tile in tiles {
            let blocks = tile.blocks as usize;
            let parts = blocks.div_ceil(part).max(1);
            let slot = split.slots;
            for index in 0..parts {
                let (first, end) = (blocks * index / parts, blocks * (index + 1) / parts);
                let run_begin = split.runs.len() as u32;
                split.cut(
                    &runs[tile.run_begin as usize..tile.run_end as usize],
                    bounds,
                    block,
                    first,
                    end,
                    &clip,
                );
                let partial = if parts > 1 { (slot + index as u32) as i32 } else { -1 };
                split.tiles.push(Tile {
                    run_begin,
                    run_end: split.runs.len() as u32,
                    partial,
                    blocks: (end - first) as u32,
                    ..*tile
                });
            }
            if parts > 1 {
                split.slots += parts as u32;
                let (start, end) = (tile.start, tile.end);
                split.merges.push(TileMerge { start, end, slot_begin: slot, slot_end: split.slots });
            }
        }
        split
    }

    /// Appends the blocks `[first, end)` of a tile.
    fn cut(
        &mut self,
        runs: &[TileRun],
        bounds: &[TileBound],
        block: usize,
        first: usize,
        end: usize,
        clip: impl Fn(&TileBound, &TileRun) -> Option<TileBound>,
    ) {
        let mut before = 0;
        for run in runs {
            let count = ((run.end - run.start) as usize).div_ceil(block);
            let (from, to) = (first.max(before) - before, end.min(before + count).max(before) - before);
            before += count;
            if from >= to {
                continue;
            }
            let part = TileRun {
                start: run.start + (from * block) as i32,
                end: run.end.min(run.start + (to * block) as i32),
                bound_begin: self.bounds.len() as u32,
                ..*run
            };
            let inside = &bounds[run.bound_begin as usize..run.bound_end as usize];
            self.bounds.extend(inside.iter().filter_map(|bound| clip(bound, &part)));
            self.runs.push(TileRun { bound_end: self.bounds.len() as u32, ..part });
        }
    }
}
