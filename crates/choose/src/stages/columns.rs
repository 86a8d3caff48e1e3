//! Areas of bands by ranges of columns, counted in one sweep: the work that a stage would have.

use counterpoint_mask::{Band, Range};

/// Unmasked pairs by column, swept from left to right. How many rows see a column is piecewise linear in it for every band,
/// so a sweep takes one step for each corner of a band, however many ranges the columns are cut into.
pub(super) struct Columns {
    /// Ascending by column.
    corners: Vec<Corner>,
    /// The first corner that is not yet passed.
    next: usize,
    column: i64,
    /// Rows that see `column`, and by how many more see the one after it.
    rows: i64,
    slope: i64,
}

/// Where the number of rows jumps or bends.
#[derive(Clone, Copy)]
struct Corner {
    column: i64,
    rows: i64,
    slope: i64,
}

impl Columns {
    /// Of trimmed bands: every column of one is seen by some row.
    pub(super) fn new(bands: &[Band]) -> Self {
        let mut corners = Vec::with_capacity(4 * bands.len());
        for band in bands {
            let (first, last) = (band.q_range.start as i64, band.q_range.end as i64 - 1);
            let (start, end) = (band.k_range.start as i64, band.k_range.end as i64);
            // Rows `x - diag_max ..= x - diag_min` see column `x`. From `full` on the last of them is the band's last row, and
            // from `shrink` on the first one is no more the band's first.
            let (full, shrink) = (last.saturating_add(band.diag_min), first.saturating_add(band.diag_max));
            let rows = |column: i64| {
                let highest = last.min(column.saturating_sub(band.diag_min));
                highest - first.max(column.saturating_sub(band.diag_max)) + 1
            };
            let slope = |column: i64| i64::from(column < full) - i64::from(column >= shrink);
            let bends = [full, shrink].into_iter().filter(|&bend| start < bend && bend < end);
            corners.push(Corner { column: start, rows: rows(start), slope: slope(start) });
            corners.extend(bends.map(|column| Corner { column, rows: 0, slope: -1 }));
            let after = slope(end - 1);
            corners.push(Corner { column: end, rows: -(rows(end - 1) + after), slope: -after });
        }
        corners.sort_unstable_by_key(|corner| corner.column);
        Self { corners, next: 0, column: 0, rows: 0, slope: 0 }
    }

    /// Unmasked pairs in `columns`, which must not lie before those asked for earlier.
    pub(super) fn area(&mut self, columns: &Range) -> u64 {
        self.sweep_to(columns.start as i64);
        self.sweep_to(columns.end as i64)
    }

    /// Goes to `column`; the pairs passed.
    fn sweep_to(&mut self, column: i64) -> u64 {
        let mut area = 0_i128;
        while self.column < column {
            while let Some(corner) = self.corners.get(self.next).filter(|corner| corner.column <= self.column)
            {
                self.rows += corner.rows;
                self.slope += corner.slope;
                self.next += 1;
            }
            let until = self.corners.get(self.next).map_or(column, |corner| corner.column.min(column));
            let steps = until - self.column;
            let (rows, slope, count) = (i128::from(self.rows), i128::from(self.slope), i128::from(steps));
            area += rows * count + slope * (count * (count - 1) / 2);
            self.rows += self.slope * steps;
            self.column = until;
        }
        area as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_what_bands_hold(
            drawn in proptest::collection::vec((0..40_usize, 1..30_usize, 0..60_usize, 1..60_usize, -70..70_i64, 0..90_i64, 0..4_u8), 0..8),
            ranges in proptest::collection::vec((0..9_usize, 1..30_usize), 1..9),
        ) {
            let bands: Vec<Band> = drawn
                .iter()
                .filter_map(|&(row, rows, column, columns, min, width, limits)| {
                    let diag_min = if limits & 1 == 1 { min } else { Band::NO_MIN };
                    let diag_max = if limits & 2 == 2 { min + width } else { Band::NO_MAX };
                    let (q_range, k_range) = (Range::new(row, row + rows), Range::new(column, column + columns));
                    Band { q_range, k_range, diag_min, diag_max }.trim()
                })
                .collect();
            let mut columns = Columns::new(&bands);
            let mut start = 0;
            for (gap, length) in ranges {
                let range = Range::new(start + gap, start + gap + length);
                let area: u64 = bands.iter().map(|band| band.clip(&band.q_range, &range).area()).sum();
                prop_assert_eq!(columns.area(&range), area);
                start = range.end;
            }
        }
    }
}
