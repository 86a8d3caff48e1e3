//! Tiles that read rows in common, found by union-find: what a deterministic backward orders, and what shares a cache.

use std::cmp::Reverse;

use super::{Tile, TileDirection, TileSchedule};

/// Which tiles belong together because they read rows in common: two that read the same row are of one chain, and so are all
/// that others join. Documents of a packed sequence are chains of their own; a causal mask is one.
///
/// Blocks of different chains may lie across each other, but what a kernel adds there is zero for the other's rows.
#[derive(Clone, Debug)]
pub(super) struct Chains {
    /// By [`Tile::number`]: the least number of its chain.
    chains: Vec<u32>,
}

impl Chains {
    /// The chains of a schedule's tiles.
    pub(super) fn of(schedule: &TileSchedule) -> Self {
        let count = schedule.tiles.iter().map(|tile| tile.number + 1).max().unwrap_or(0);
        let mut joined = Self { chains: (0..count).collect() };
        let mut open: Option<(i32, u32)> = None;
        for (start, end, number) in read_rows(schedule) {
            open = match open {
                Some((last_end, last)) if start < last_end => {
                    joined.join(last, number);
                    Some((end.max(last_end), number))
                }
                _ => Some((end, number)),
            };
        }
        for number in 0..count {
            joined.chains[number as usize] = joined.find(number);
        }
        joined
    }

    /// The chain of the tiles of this number.
    pub(super) fn chain(&self, number: u32) -> u32 {
        self.chains[number as usize]
    }

    /// Sorts tiles so that those of a chain stay in the order of their numbers, and otherwise those come first that have most
    /// blocks, or that one with so many waits for.
    pub(super) fn sort(&self, tiles: &mut [Tile]) {
        tiles.sort_unstable_by_key(|tile| Reverse(tile.number));
        let mut heaviest = vec![0; self.chains.len()];
        let mut weights = vec![0; self.chains.len()];
        for tile in tiles.iter() {
            let heaviest = &mut heaviest[self.chain(tile.number) as usize];
            *heaviest = tile.blocks.max(*heaviest);
            weights[tile.number as usize] = *heaviest;
        }
        // Parts of a tile follow one another as they did.
        tiles
            .sort_unstable_by_key(|tile| (Reverse(weights[tile.number as usize]), tile.number, tile.partial));
    }

    fn find(&mut self, number: u32) -> u32 {
        let mut root = number;
        while self.chains[root as usize] != root {
            let above = self.chains[self.chains[root as usize] as usize];
            self.chains[root as usize] = above;
            root = above;
        }
        root
    }

    fn join(&mut self, a: u32, b: u32) {
        let (a, b) = (self.find(a), self.find(b));
        self.chains[a.max(b) as usize] = a.min(b);
    }
}

/// Of each tile, by its number, which segment of rows it mostly reads: segments are what the tiles' rows in common make up, and
/// unlike [`Chains`] they are not joined by a tile that reads two, such as one that has the end of a document and the next one's
/// beginning.
pub(super) fn row_segments(schedule: &TileSchedule) -> Vec<u32> {
    let count = schedule.tiles.iter().map(|tile| tile.number + 1).max().unwrap_or(0);
    let mut longest = vec![(0, 0); count as usize];
    let (mut segment, mut segment_end) = (0, i32::MIN);
    for (start, end, number) in read_rows(schedule) {
        if start >= segment_end {
            segment += 1;
        }
        segment_end = segment_end.max(end);
        let longest = &mut longest[number as usize];
        if end - start > longest.0 {
            *longest = (end - start, segment);
        }
    }
    longest.into_iter().map(|(_, segment)| segment).collect()
}

/// The rows that tiles read and see, first and end, with the tiles' numbers, sorted.
fn read_rows(schedule: &TileSchedule) -> Vec<(i32, i32, u32)> {
    let mut read_rows = Vec::with_capacity(schedule.runs.len());
    for tile in &schedule.tiles {
        for run in schedule.runs_of(tile) {
            let bounds = schedule.bounds_of(run);
            if bounds.is_empty() {
                read_rows.push((run.start, run.end, tile.number));
            }
            read_rows.extend(bounds.iter().map(|bound| match schedule.config.direction {
                TileDirection::Forward => (bound.k_start, bound.k_end, tile.number),
                TileDirection::Backward => (bound.q_start, bound.q_end, tile.number),
            }));
        }
    }
    read_rows.sort_unstable();
    read_rows
}
