//! The structs of a tile schedule as host and kernels share them; `attention/tile_schedule.cuh` has the same.

use bytemuck::{Pod, Zeroable};

/// Where a bound has no limit on its diagonal: `-NO_LIMIT` below, `NO_LIMIT` above. Adding it to a row cannot overflow.
pub const NO_LIMIT: i32 = 1 << 30;

/// Rows that one CTA owns, and the runs that it loops over. The same as `Tile` in `attention/tile_schedule.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct Tile {
    /// First owned row, in tokens (forward: query row; backward: key row).
    pub start: i32,
    /// End of the owned rows; at most the schedule's `tile_rows` after the start.
    pub end: i32,
    /// First run.
    pub run_begin: u32,
    /// End of the runs. Without any, the results of the rows are zeros.
    pub run_end: u32,
    /// -1, or the slot of the partial result that this tile, or part of one, writes.
    pub partial: i32,
    /// Blocks in all its runs.
    pub blocks: u32,
    /// Place of the tile when tiles are ordered by their rows. The parts of a split tile share it.
    pub number: u32,
    /// 0.
    pub reserved: u32,
}

/// Consecutive blocks along the inner axis that share one list of bounds. The same as `TileRun` in
/// `attention/tile_schedule.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct TileRun {
    /// First row of the first block.
    pub start: i32,
    /// End of the last block's rows. Blocks are `block` rows from the start on; the last may be short.
    pub end: i32,
    /// First bound.
    pub bound_begin: u32,
    /// End of the bounds. Without any the run is *full*: every pair of the tile's rows with its rows is unmasked, and no
    /// block is short.
    pub bound_end: u32,
}

/// One part of the mask, in tokens: a rectangle and a range of diagonals. A pair of a bounded run is unmasked when any of
/// the run's bounds holds it; they are disjoint. The same as `TileBound` in `attention/tile_schedule.cuh`, which is read in
/// pieces of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct TileBound {
    /// First query row.
    pub q_start: i32,
    /// End of the query rows.
    pub q_end: i32,
    /// First key row.
    pub k_start: i32,
    /// End of the key rows.
    pub k_end: i32,
    /// Smallest unmasked `k - q`; `-NO_LIMIT` when there is no limit.
    pub diag_min: i32,
    /// Largest unmasked `k - q`; [`NO_LIMIT`] when there is no limit.
    pub diag_max: i32,
    /// 0.
    pub reserved: [i32; 2],
}

/// A tile that was split: the slots of its partial results, to be merged into its rows. The same as `TileMerge` in
/// `attention/tile_schedule.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct TileMerge {
    /// First row.
    pub start: i32,
    /// End of the rows.
    pub end: i32,
    /// First slot.
    pub slot_begin: u32,
    /// End of the slots.
    pub slot_end: u32,
}

// The device's static_assert holds the same sizes.
const _: () = assert!(size_of::<Tile>() == 32 && size_of::<TileRun>() == 16);
const _: () = assert!(size_of::<TileBound>() == 32 && size_of::<TileMerge>() == 16);
