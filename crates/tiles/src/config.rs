//! How tile schedules are made: which axis tiles own, their sizes and places, their order, and whether they are split.

use counterpoint_mask::Band;
use serde::{Deserialize, Serialize};

use super::TileScheduleError;

/// Which axis tiles own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TileDirection {
    /// Tiles own query rows and loop over key rows.
    Forward,
    /// Tiles own key rows and loop over query rows.
    Backward,
}

impl TileDirection {
    /// Rows of the owned axis.
    pub(super) fn own_rows(self, q_rows: usize, k_rows: usize) -> usize {
        match self {
            Self::Forward => q_rows,
            Self::Backward => k_rows,
        }
    }

    /// `band` with the owned axis as its rows and the inner axis as its columns, or such a band turned back.
    pub(super) fn turn(self, band: &Band) -> Band {
        match self {
            Self::Forward => *band,
            // The bounds that stand for no limit are each other's negatives, so they stay such.
            Self::Backward => Band {
                q_range: band.k_range,
                k_range: band.q_range,
                diag_min: -band.diag_max,
                diag_max: -band.diag_min,
            },
        }
    }
}

/// Where tiles or blocks begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TilePlacement {
    /// Where the mask suggests. A block starts at the first column that is not read yet and that some row of the tile
    /// sees, which makes the number of blocks the smallest possible. A tile ends early, at a row where a part of the mask
    /// begins or ends, when that saves work in all.
    Tight,
    /// At multiples of their size. Then a row's blocks (or the tiles that a row is summed over) do not depend on how the
    /// mask was cut into stages at such multiples, and with them not the last bit of its result.
    Aligned,
}

/// The order of the tiles in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TileOrder {
    /// Most blocks first, then by rows: what a queue needs so that CTAs finish together.
    Work,
    /// As `Work`, but of tiles that read a row in common, directly or by others, the one with the lower rows comes first: what
    /// a backward needs whose additions to dq are ordered by key tile, since whoever is waited for must have started.
    Chains,
}

/// Splitting tiles along the inner axis when they are too few to keep a device busy, or when the last ones would keep only a part
/// of it busy. The parts' results are merged after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TileSplit {
    /// CTAs that run at a time.
    pub workers: usize,
    /// Heads that each follow the schedule (key heads where the query heads of a key head are packed into a tile).
    pub heads: usize,
    /// The most partial results for the sake of the last round, which is a gain of percents: none there where more would be needed. Tiles that
    /// are too few are split all the same, into some more parts than there are CTAs for at most.
    pub last_round_partials: usize,
}

/// Which tiles leave partial results, which are merged after, in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TilePartials {
    /// The parts of those that are split.
    #[default]
    OfSplit,
    /// All: a tile that is whole leaves one.
    OfAll,
}

/// How a [`TileSchedule`](super::TileSchedule) is made. All sizes are in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TileScheduleConfig {
    /// Which axis tiles own.
    pub direction: TileDirection,
    /// Most tokens that a tile owns: a CTA's rows over the heads that are packed into them.
    pub tile_rows: usize,
    /// Tokens of a block along the inner axis.
    pub block: usize,
    /// Where tiles begin.
    pub tiles: TilePlacement,
    /// Where blocks begin.
    pub blocks: TilePlacement,
    /// The order of tiles.
    pub order: TileOrder,
    /// Whether and for whom tiles may be split. Merging parts rounds differently from not splitting.
    pub split: Option<TileSplit>,
    /// Which tiles leave partial results.
    pub partials: TilePartials,
    /// Key row from which on keys arrive while the kernel runs: no block and no tile of keys lies on both sides of it, and tiles
    /// that need none of the later rows come before the others.
    pub arrival: Option<usize>,
}

impl TileScheduleConfig {
    /// The fastest schedule: tight tiles and blocks, heaviest tiles first, nothing split.
    pub const fn new(direction: TileDirection, tile_rows: usize, block: usize) -> Self {
        Self {
            direction,
            tile_rows,
            block,
            tiles: TilePlacement::Tight,
            blocks: TilePlacement::Tight,
            order: TileOrder::Work,
            split: None,
            partials: TilePartials::OfSplit,
            arrival: None,
        }
    }

    /// What a block of which so many of a tile's rows see something costs, in columns. A backward tests it for all keys if it is not
    /// all rows that a tile can have, also where those that are missing belong to the next tile. That takes a quarter of a block (a
    /// trace: 4600 to 4900 cycles instead of 3830).
    pub(super) const fn block_cost(&self, seeing: usize) -> u64 {
        let is_tested = matches!(self.direction, TileDirection::Backward) && seeing < self.tile_rows;
        (self.block + if is_tested { self.block / 4 } else { 0 }) as u64
    }

    pub(super) fn validate(&self) -> Result<(), TileScheduleError> {
        for (field, size) in [("tile_rows", self.tile_rows), ("block", self.block)] {
            if size == 0 || size > super::MAX_TILE_SIZE {
                return Err(TileScheduleError::Size { field, size, limit: super::MAX_TILE_SIZE });
            }
        }
        match self.split {
            Some(TileSplit { workers: 0, .. }) => Err(TileScheduleError::Nobody { field: "workers" }),
            Some(TileSplit { heads: 0, .. }) => Err(TileScheduleError::Nobody { field: "heads" }),
            _ => Ok(()),
        }
    }
}
