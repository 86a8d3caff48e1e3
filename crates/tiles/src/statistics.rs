//! Figures of a written tile schedule: its blocks, the share of unmasked pairs, and its makespan.

use serde::{Deserialize, Serialize};

use super::list_time::list_time;
use super::{TILE_COST, Tile, TileSchedule};

/// Figures of a [`TileSchedule`], for reports and for choosing sizes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TileStatistics {
    /// Tiles, parts of split ones counted each.
    pub tiles: usize,
    /// Tiles without a block.
    pub idle_tiles: usize,
    /// Blocks of the tile that has most.
    pub longest_tile: usize,
    /// Blocks of all tiles.
    pub blocks: u64,
    /// Those of them that bounds are tested for.
    pub bounded_blocks: u64,
    /// Unmasked pairs.
    pub area: u64,
    /// Share of the computed pairs that are unmasked: `area / (blocks * tile_rows * block)`; 1.0 without a block.
    pub efficiency: f64,
    /// Bytes of the schedule.
    pub bytes: usize,
}

impl TileSchedule {
    /// The schedule's figures.
    pub fn statistics(&self) -> TileStatistics {
        let block = self.config.block;
        let blocks = self.tiles.iter().map(|tile| u64::from(tile.blocks)).sum::<u64>();
        let bounded = self.runs.iter().filter(|run| run.bound_begin < run.bound_end);
        let computed = blocks as f64 * self.config.tile_rows as f64 * block as f64;
        TileStatistics {
            tiles: self.tiles.len(),
            idle_tiles: self.tiles.iter().filter(|tile| tile.blocks == 0).count(),
            longest_tile: self.tiles.iter().map(|tile| tile.blocks as usize).max().unwrap_or(0),
            blocks,
            bounded_blocks: bounded.map(|run| ((run.end - run.start) as u64).div_ceil(block as u64)).sum(),
            area: self.area,
            efficiency: if blocks == 0 { 1.0 } else { self.area as f64 / computed },
            bytes: self.bytes(),
        }
    }

    /// Time until all of `workers` CTAs have finished when each takes the next tile and head as soon as it is free. The unit
    /// is the time of one column of a block; a tile costs as much as 160 columns besides its blocks. Tiles are handed out in
    /// the schedule's order, each for all of `heads` before the next. `O(tiles * heads * log workers)`: to choose sizes by,
    /// not for every call.
    ///
    /// `area * heads / (makespan * workers * tile_rows)` is the share of the device's time that goes into unmasked pairs, if
    /// blocks run without a stop.
    ///
    /// # Panics
    /// When there is no worker.
    pub fn makespan(&self, workers: usize, heads: usize) -> u64 {
        let cost = |tile: &Tile| u64::from(tile.blocks) * self.config.block as u64 + TILE_COST;
        list_time(self.tiles.iter().map(|tile| (cost(tile), heads)), workers)
    }
}
