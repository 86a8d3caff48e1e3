//! What is refused of a tile schedule: sizes that no kernel has, bands past the rows, more than 32-bit indices can hold.

use counterpoint_mask::Range;
use thiserror::Error;

/// Why no [`TileSchedule`](super::TileSchedule) was made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TileScheduleError {
    /// A size that no kernel has.
    #[error("{field} is {size} tokens; choose 1 to {limit}")]
    Size {
        /// `tile_rows` or `block`.
        field: &'static str,
        /// The size.
        size: usize,
        /// The largest one allowed.
        limit: usize,
    },
    /// Splitting for no worker or no head.
    #[error("split.{field} is 0; give at least 1, or leave split out")]
    Nobody {
        /// `workers` or `heads`.
        field: &'static str,
    },
    /// More rows than a schedule's 32-bit indices can hold.
    #[error(
        "{rows} {axis} rows are more than the {limit} of one kernel call; shard the sequence over more ranks"
    )]
    TooManyRows {
        /// `query` or `key`.
        axis: &'static str,
        /// The number of rows.
        rows: usize,
        /// The largest one allowed.
        limit: usize,
    },
    /// A band reaches past the rows.
    #[error("band {index} is {axis} rows {range} of {rows}; clip it to the rows of the tensors")]
    PastTheRows {
        /// Index of the band.
        index: usize,
        /// `query` or `key`.
        axis: &'static str,
        /// The band's rows.
        range: Range,
        /// Rows of the tensor.
        rows: usize,
    },
    /// Nobody wants it any more.
    #[error("counting tiles was interrupted")]
    Interrupted,
    /// More runs or bounds than 32-bit indices can hold.
    #[error(
        "the mask is cut into {entries} {what}, more than {limit}; use larger tiles, or slices that are less fine"
    )]
    TooFine {
        /// `runs` or `bounds`.
        what: &'static str,
        /// How many there are.
        entries: usize,
        /// The largest number allowed.
        limit: usize,
    },
}
