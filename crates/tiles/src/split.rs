//! Splitting tiles along the inner axis.

use super::list_time::list_time;
use super::{TILE_COST, Tile, TileBound, TileMerge, TilePartials, TileRun, TileSplit};

/// A part of fewer blocks would wait for its first block longer than it computes.
const LEAST_PART: usize = 4;

/// What a part costs besides its blocks, in columns: what a tile costs, and writing and merging an f32 result.
const PART_COST: u64 = 2 * TILE_COST;

/// What merging costs in all, in columns: the launch of one more kernel.
const MERGE_COST: u64 = 400;

/// After so many rounds of all workers an incomplete last one is not worth mending.
const MOST_ROUNDS: usize = 64;

/// How one tile is cut: a first part of `first` blocks, if any, and `parts` equal parts of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    first: usize,
    parts: usize,
}

impl Cut {
    pub(super) const WHOLE: Self = Self { first: 0, parts: 1 };

    fn equal(parts: usize) -> Self {
        Self { first: 0, parts }
    }

    /// Blocks of the parts, when there are `blocks` in all.
    fn sizes(self, blocks: usize) -> impl Iterator<Item = usize> {
        let Self { first, parts } = self;
        let rest = blocks - first;
        let equal = (0..parts).map(move |index| rest * (index + 1) / parts - rest * index / parts);
        (first > 0).then_some(first).into_iter().chain(equal)
    }

    fn count(self) -> usize {
        self.parts + usize::from(self.first > 0)
    }
}

/// How to cut each of `tiles` when splitting pays: those that alone take longer than everybody's share, or else some at the
/// end, when a last round would keep too few workers busy. `None` when it does not.
pub(super) fn cuts(tiles: &[Tile], block: usize, split: &TileSplit) -> Option<Vec<Cut>> {
    let mut blocks: Vec<usize> =
        tiles.iter().map(|tile| tile.blocks as usize).filter(|&blocks| blocks > 0).collect();
    blocks.sort_unstable_by(|a, b| b.cmp(a));
    let longest = *blocks.first()?;
    // What every worker has to do when all finish together.
    let share = (blocks.iter().sum::<usize>() * split.heads).div_ceil(split.workers);
    if longest < 2 * LEAST_PART {
        return None;
    }
    if longest > share {
        let part = long_tiles(&blocks, block, split, share)?;
        return Some(
            tiles.iter().map(|tile| Cut::equal((tile.blocks as usize).div_ceil(part).max(1))).collect(),
        );
    }
    let (count, shape) = last_round(&blocks, block, split)?;
    let mut last: Vec<usize> = (0..tiles.len()).filter(|&index| tiles[index].blocks > 0).collect();
    last.sort_by_key(|&index| tiles[index].blocks);
    let mut cuts = vec![Cut::WHOLE; tiles.len()];
    for &index in &last[..count] {
        cuts[index] = shape.of(tiles[index].blocks as usize);
    }
    Some(cuts)
}

/// The most blocks of a part when splitting all longer tiles pays. `blocks` are those of every tile, most first.
fn long_tiles(blocks: &[usize], block: usize, split: &TileSplit, share: usize) -> Option<usize> {
    let longest = *blocks.first()?;
    let makespan = |part: usize| makespan(blocks, block, split, part);
    let most = (longest / LEAST_PART).min(2 * longest.div_ceil(share) + 2);
    let choices: Vec<(u64, usize)> =
        (2..=most).map(|parts| longest.div_ceil(parts)).map(|part| (makespan(part), part)).collect();
    let (least, _) = *choices.iter().min()?;
    // Partial results take memory and merging, so a little time is no reason for more parts.
    let (found, part) = *choices.iter().find(|&&(found, _)| found <= least + least / 16)?;
    (found + MERGE_COST < makespan(longest)).then_some(part)
}

/// A way to cut tiles of any length: `sixteenths` of the blocks first, the rest in `parts` equal parts.
#[derive(Clone, Copy, Debug)]
struct CutShape {
    sixteenths: usize,
    parts: usize,
}

impl CutShape {
    fn of(self, blocks: usize) -> Cut {
        Cut { first: blocks * self.sixteenths / 16, parts: self.parts }
    }

    /// Equal parts, or a large one for those who have something to do anyway and small ones for those who have not.
    fn all() -> impl Iterator<Item = Self> {
        let equal = [2, 3, 4, 5, 6, 8, 12, 16].map(|parts| Self { sixteenths: 0, parts });
        let unlike = (2..15).flat_map(|sixteenths| (1..5).map(move |parts| Self { sixteenths, parts }));
        equal.into_iter().chain(unlike)
    }
}

/// How many of the shortest tiles to cut, and how, when that ends a launch earlier whose last round would keep too few workers
/// busy: tiles of one length on a number of workers that does not divide their number. `blocks` are those of every tile, most
/// first.
fn last_round(blocks: &[usize], block: usize, split: &TileSplit) -> Option<(usize, CutShape)> {
    let TileSplit { workers, heads, last_round_partials } = *split;
    let items = blocks.len() * heads;
    if items > MOST_ROUNDS * workers {
        return None;
    }
    let cost = |blocks: usize| (blocks * block) as u64;
    let time = |cut: usize, shape: CutShape| {
        let (whole, cut) = blocks.split_at(blocks.len() - cut);
        let mut costs: Vec<(u64, usize)> =
            whole.iter().map(|&blocks| (cost(blocks) + TILE_COST, heads)).collect();
        for &blocks in cut {
            costs.extend(shape.of(blocks).sizes(blocks).map(|blocks| (cost(blocks) + PART_COST, heads)));
        }
        costs.sort_unstable_by(|a, b| b.cmp(a));
        list_time(costs, workers)
    };
    let whole = time(0, CutShape { sixteenths: 0, parts: 1 });
    let all = blocks.iter().map(|&blocks| cost(blocks) + TILE_COST).sum::<u64>() * heads as u64;
    // Partial results take memory, and only a part of what is expected comes true: power is short, and idle workers save it. What
    // cannot be gained is not looked for.
    let least_gain = MERGE_COST + whole / 64;
    if all / workers as u64 + least_gain >= whole {
        return None;
    }
    // Tiles that the incomplete round consists of, or some more.
    let incomplete = (items % workers).div_ceil(heads).max(1);
    let most = incomplete.max((items % workers + workers / 4) / heads).min(blocks.len());
    let mut choices = Vec::new();
    for count in incomplete..=most {
        let shortest = &blocks[blocks.len() - count..];
        for shape in CutShape::all() {
            let long_enough = |&blocks: &usize| shape.of(blocks).sizes(blocks).all(|part| part >= LEAST_PART);
            if shortest.iter().all(long_enough) {
                let partials: usize = shortest.iter().map(|&blocks| shape.of(blocks).count()).sum();
                if partials <= last_round_partials {
                    choices.push((time(count, shape), partials, count, shape));
                }
            }
        }
    }
    let least = choices.iter().map(|choice| choice.0).min()?;
    let good = choices.iter().filter(|choice| choice.0 <= least + whole / 256);
    let &(found, _, count, shape) = good.min_by_key(|choice| (choice.1, choice.0))?;
    (found + least_gain < whole).then_some((count, shape))
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
    /// Cuts each of `tiles` as the one of `cuts` says.
    pub(super) fn new(
        (tiles, runs, bounds): (&[Tile], &[TileRun], &[TileBound]),
        (block, partials): (usize, TilePartials),
        cuts: &[Cut],
        clip: impl Fn(&TileBound, &TileRun) -> Option<TileBound>,
    ) -> Self {
        let mut split = Self::default();
        for (tile, cut) in tiles.iter().zip(cuts) {
            let (parts, slot) = (cut.count(), split.slots);
            let is_merged = parts > 1 || partials == TilePartials::OfAll;
            let mut first = 0;
            for (index, size) in cut.sizes(tile.blocks as usize).enumerate() {
                let end = first + size;
                let run_begin = split.runs.len() as u32;
                split.cut(
                    &runs[tile.run_begin as usize..tile.run_end as usize],
                    bounds,
                    block,
                    first,
                    end,
                    &clip,
                );
                let partial = if is_merged { (slot + index as u32) as i32 } else { -1 };
                split.tiles.push(Tile {
                    run_begin,
                    run_end: split.runs.len() as u32,
                    partial,
                    blocks: (end - first) as u32,
                    ..*tile
                });
                first = end;
            }
            if is_merged {
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
