//! Which columns the rows of a tile see, and which of them every row sees: there blocks need no mask.

use counterpoint_mask::{Band, Range};

use super::nearly_sorted::sort_nearly_sorted;

/// The columns that a tile's rows see.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    /// Columns that at least one row sees: ascending, with gaps between.
    pub(super) seen: Vec<Range>,
    /// Columns that every row sees, likewise.
    pub(super) full: Vec<Range>,
    kinks: Vec<Kink>,
}

/// A column from which on the number of rows that see a column is another affine function: the change of its value there,
/// and of its slope.
#[derive(Clone, Copy, Debug)]
struct Kink {
    column: usize,
    value: i64,
    slope: i64,
}

impl Coverage {
    /// Bytes of its lists.
    pub(super) fn bytes(&self) -> usize {
        (self.seen.capacity() + self.full.capacity()) * size_of::<Range>()
            + self.kinks.capacity() * size_of::<Kink>()
    }

    /// Looks at `pieces`: the mask inside a tile of `rows`, disjoint, trimmed, ascending by first column.
    pub(super) fn measure(&mut self, rows: &Range, pieces: &[Band]) {
        self.seen.clear();
        self.full.clear();
        for piece in pieces {
            extend(&mut self.seen, piece.k_range);
        }
        self.count(rows, pieces);
    }

    /// In one piece, the number of rows that see a column is affine between at most four columns. The sum over pieces is
    /// too, and it is the number of all rows exactly where every row sees the column, by whichever piece.
    fn count(&mut self, rows: &Range, pieces: &[Band]) {
        self.kinks.clear();
        for piece in pieces {
            let (q, k) = (piece.q_range, piece.k_range);
            let (start, end) = (k.start as i64, k.end as i64);
            // Up to the first column the last row to see a column moves down with the column; from the second on the
            // first row to see it does.
            let whole_below = (q.end as i64 - 1 + piece.diag_min).max(start);
            let whole_above = (q.start as i64 + piece.diag_max).max(start);
            let first = (q.start as i64).max(start - piece.diag_max);
            let last = (q.end as i64 - 1).min(start - piece.diag_min);
            let mut at = Kink { column: k.start, value: last - first + 1, slope: 1 };
            let (mut value, mut slope) = (at.value, 1);
            let mut column = start;
            for kink in [whole_below.min(whole_above), whole_below.max(whole_above)] {
                if kink >= end {
                    break;
                }
                value += slope * (kink - column);
                column = kink;
                slope -= 1;
                if kink == start {
                    at.slope = slope;
                } else {
                    self.kinks.push(Kink { column: kink as usize, value: 0, slope: -1 });
                }
            }
            value += slope * (end - column);
            self.kinks.push(at);
            self.kinks.push(Kink { column: k.end, value: -value, slope: -slope });
        }
        sort_nearly_sorted(&mut self.kinks, |kink| kink.column);
        let all = rows.len() as i64;
        let (mut value, mut slope, mut column) = (0, 0, 0);
        for kink in &self.kinks {
            if kink.column > column {
                let last = value + slope * (kink.column - 1 - column) as i64;
                // No column has more than all rows, so a line that does not stay there has it at one end only.
                match (value == all, last == all) {
                    (true, true) => extend(&mut self.full, Range::new(column, kink.column)),
                    (true, false) => extend(&mut self.full, Range::new(column, column + 1)),
                    (false, true) => extend(&mut self.full, Range::new(kink.column - 1, kink.column)),
                    (false, false) => {}
                }
                value = last + slope;
                column = kink.column;
            }
            value += kink.value;
            slope += kink.slope;
        }
    }
}

/// The columns of a tile that touches but one `piece` of the mask, trimmed, which every one of its `rows` sees.
pub(super) fn full_columns(rows: &Range, piece: &Band) -> Option<Range> {
    // The last row is the last to lose sight of a column on the left, the first one to see one on the right.
    let start = (rows.end as i64 - 1 + piece.diag_min).max(piece.k_range.start as i64);
    let end = (rows.start as i64 + piece.diag_max + 1).min(piece.k_range.end as i64);
    (piece.q_range == *rows && start < end).then(|| Range::new(start as usize, end as usize))
}

/// Adds a range that starts no earlier than those before it.
fn extend(ranges: &mut Vec<Range>, range: Range) {
    match ranges.last_mut() {
        Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
        _ => ranges.push(range),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROWS: usize = 5;
    const COLUMNS: usize = 9;

    /// Small bands of all sorts that share no pair.
    fn pieces() -> impl Strategy<Value = Vec<Band>> {
        let band = (0..ROWS, 1..=ROWS, 0..COLUMNS, 1..=COLUMNS, -5..9_i64, 0..9_i64, 0..4_u8);
        proptest::collection::vec(band, 0..8).prop_map(|drawn| {
            let mut pieces: Vec<Band> = Vec::new();
            for (q, height, k, width, min, between, limits) in drawn {
                let diag_min = if limits & 1 == 0 { min } else { Band::NO_MIN };
                let diag_max = if limits & 2 == 0 { min + between } else { Band::NO_MAX };
                let (q_range, k_range) =
                    (Range::new(q, (q + height).min(ROWS)), Range::new(k, (k + width).min(COLUMNS)));
                let band = Band { q_range, k_range, diag_min, diag_max };
                if let Some(band) = band.trim()
                    && pieces.iter().all(|piece| piece.intersect(&band).is_empty())
                {
                    pieces.push(band);
                }
            }
            pieces.sort_unstable_by_key(|piece| piece.k_range.start);
            pieces
        })
    }

    /// The columns of `ranges`, which must have gaps between.
    fn columns(ranges: &[Range]) -> Vec<usize> {
        assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        ranges.iter().flat_map(|range| range.start..range.end).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn columns_are_counted(pieces in pieces(), start in 0..ROWS, len in 1..=ROWS) {
            let rows = Range::new(start, (start + len).min(ROWS));
            let mut pieces: Vec<Band> = pieces.iter().filter_map(|piece| piece.clip(&rows, &piece.k_range).trim()).collect();
            pieces.sort_unstable_by_key(|piece| piece.k_range.start);
            let mut coverage = Coverage::default();
            coverage.measure(&rows, &pieces);
            let sees = |row: usize, column: usize| pieces.iter().any(|piece| piece.contains(row, column));
            let seen: Vec<usize> = (0..COLUMNS).filter(|&column| (rows.start..rows.end).any(|row| sees(row, column))).collect();
            let full: Vec<usize> = (0..COLUMNS).filter(|&column| (rows.start..rows.end).all(|row| sees(row, column))).collect();
            prop_assert_eq!(columns(&coverage.seen), seen);
            prop_assert_eq!(columns(&coverage.full), full);
        }
    }
}
