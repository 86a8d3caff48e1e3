//! What tiles that begin in one row see of each band, and the blocks that hold it.

use counterpoint_mask::{Band, Range};

use super::TileScheduleConfig;
use super::nearly_sorted::sort_nearly_sorted;
use super::run_builder::first_block;

/// What a band has in tiles that begin in one row. Every row of a trimmed band sees something, so the first column is the first row's and
/// the last column the last row's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    /// The first column, whichever row the tile ends in.
    start: usize,
    /// Rows of the band.
    rows: Range,
    /// Where its columns end, and its diagonals.
    end: i64,
    diag_max: i64,
}

impl Lane {
    /// What `band` has in tiles that begin in `row` and touch it.
    #[inline]
    pub(super) fn of(band: &Band, row: usize) -> Self {
        let first = band.q_range.start.max(row) as i64;
        let start = (first + band.diag_min).max(band.k_range.start as i64) as usize;
        Self { start, rows: band.q_range, end: band.k_range.end as i64, diag_max: band.diag_max }
    }

    /// Where the columns end that rows before `end` see.
    #[inline]
    fn end(&self, end: usize) -> usize {
        (end.min(self.rows.end) as i64 + self.diag_max).min(self.end) as usize
    }
}

/// Those of `bands` that a tile from `row` to `limit` touches, ascending by first column.
pub(super) fn lanes_of(bands: &[Band], row: usize, limit: usize, lanes: &mut Vec<Lane>) {
    lanes.clear();
    lanes.extend(bands.iter().filter(|band| band.q_range.start < limit).map(|band| Lane::of(band, row)));
    // Documents one after another ascend already.
    sort_nearly_sorted(lanes, |lane| lane.start);
}

/// Blocks that hold all columns that rows before `end` see.
pub(super) fn blocks(lanes: &[Lane], end: usize, config: &TileScheduleConfig) -> u64 {
    let (mut blocks, mut covered) = (0, 0);
    for lane in lanes.iter().filter(|lane| lane.rows.start < end) {
        let (first, end) = (lane.start.max(covered), lane.end(end));
        if first < end {
            let start = first_block(first, config.block, config.blocks);
            // Columns are fewer than 2^32, and narrow numbers are divided faster.
            let count = ((end - start) as u32).div_ceil(config.block as u32) as usize;
            blocks += count as u64;
            covered = start + count * config.block;
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few and many, in every order of their columns: ascending, as documents are, descending, as stripes that begin row after row are, and mixed.
    #[test]
    fn lanes_ascend_in_whatever_order_bands_come() {
        const ROWS: usize = 400;
        for count in [1, 2, 16, 17, 80] {
            let orders: [fn(usize, usize) -> usize; 3] =
                [|at, _| at, |at, count| count - 1 - at, |at, count| (at * 7 + 3) % count];
            for order in orders {
                let bands: Vec<Band> = (0..count)
                    .map(|at| {
                        let columns = 2 * ROWS * order(at, count);
                        Band::full(Range::new(at, ROWS), Range::new(columns, columns + 50))
                    })
                    .collect();
                let mut lanes = Vec::new();
                lanes_of(&bands, 0, ROWS, &mut lanes);
                let mut wanted: Vec<usize> = bands.iter().map(|band| band.k_range.start).collect();
                wanted.sort_unstable();
                assert_eq!(lanes.iter().map(|lane| lane.start).collect::<Vec<_>>(), wanted);
                // Those that begin later are not touched.
                lanes_of(&bands, 0, 1, &mut lanes);
                assert_eq!(lanes.len(), 1);
            }
        }
    }
}
