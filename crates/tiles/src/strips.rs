//! Rectangles of which many lie next to each other, cut anew into strips of rows. A staircase of columns, each of which is seen from its
//! own row on, is as many rectangles in its last rows as it has steps, and every tile there would look at all of them: quadratic in the
//! steps. In strips of rows it is one rectangle at each step.

use std::collections::BTreeMap;

use counterpoint_mask::{Band, Range};

/// Rectangles that rows may have next to each other before they are cut anew: what tiles of usual masks look at stays as it is cut.
const MOST: usize = 64;

/// The same pairs, sorted. Where more than [`MOST`] rectangles share a row all rectangles are cut into strips: no more than six for each, and in
/// each row as few as there are spans of columns that it sees in rectangles. Takes `O(n log n)`.
pub(super) fn recut(bands: Vec<Band>) -> Vec<Band> {
    if bands.len() <= MOST || most_at_once(&bands) <= MOST {
        return bands;
    }
    let (rectangles, mut others): (Vec<Band>, Vec<Band>) = bands.iter().partition(|band| band.is_rectangle());
    match strips(&rectangles) {
        Some(strips) => {
            others.extend(strips);
            others.sort_unstable();
            others
        }
        None => bands,
    }
}

/// How many rectangles a row has at most.
fn most_at_once(bands: &[Band]) -> usize {
    let mut events: Vec<(usize, bool)> = Vec::with_capacity(2 * bands.len());
    for band in bands.iter().filter(|band| band.is_rectangle()) {
        events.extend([(band.q_range.start, true), (band.q_range.end, false)]);
    }
    // Ends come before begins.
    events.sort_unstable();
    let (mut now, mut most) = (0usize, 0);
    for (_, begins) in events {
        now = if begins { now + 1 } else { now.saturating_sub(1) };
        most = most.max(now);
    }
    most
}

/// A span of columns that all rows since one see.
#[derive(Clone, Copy)]
struct ColumnSpan {
    columns: Range,
    since: usize,
}

/// Strips of rows; `None` for rectangles that overlap.
fn strips(rectangles: &[Band]) -> Option<Vec<Band>> {
    let mut events: Vec<(usize, bool, Range)> = Vec::with_capacity(2 * rectangles.len());
    for band in rectangles {
        events.push((band.q_range.start, true, band.k_range));
        events.push((band.q_range.end, false, band.k_range));
    }
    events.sort_unstable();
    let mut strips = Vec::with_capacity(2 * rectangles.len());
    // By first column.
    let mut open: BTreeMap<usize, ColumnSpan> = BTreeMap::new();
    for (row, begins, columns) in events {
        let mut end = |span: &ColumnSpan| {
            if span.since < row {
                strips.push(Band::full(Range::new(span.since, row), span.columns));
            }
        };
        let before = open.range(..=columns.start).next_back().map(|(_, span)| *span);
        if begins {
            let after = open.range(columns.start..).next().map(|(_, span)| *span);
            if before.is_some_and(|span| span.columns.end > columns.start)
                || after.is_some_and(|span| span.columns.start < columns.end)
            {
                return None;
            }
            let mut whole = columns;
            if let Some(left) = before.filter(|span| span.columns.end == columns.start) {
                end(&left);
                open.remove(&left.columns.start);
                whole.start = left.columns.start;
            }
            if let Some(right) = after.filter(|span| span.columns.start == columns.end) {
                end(&right);
                open.remove(&right.columns.start);
                whole.end = right.columns.end;
            }
            open.insert(whole.start, ColumnSpan { columns: whole, since: row });
        } else {
            let around = before.filter(|span| span.columns.end >= columns.end)?;
            end(&around);
            open.remove(&around.columns.start);
            for (start, stop) in [(around.columns.start, columns.start), (columns.end, around.columns.end)] {
                if start < stop {
                    open.insert(start, ColumnSpan { columns: Range::new(start, stop), since: row });
                }
            }
        }
    }
    Some(strips)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sees(bands: &[Band], row: usize, column: usize) -> usize {
        bands.iter().filter(|band| band.contains(row, column)).count()
    }

    /// Steps that begin in another row each and last to the end, and the same turned.
    #[test]
    fn a_staircase_is_one_strip_a_step() {
        for steps in [100, 10_000] {
            let step = |at: usize| Range::new(8 * at, 8 * at + 8);
            let below = |at: usize| Range::new(8 * at, 8 * steps);
            let columns: Vec<Band> = (0..steps).map(|at| Band::full(below(at), step(at))).collect();
            let rows = |at: usize| Band::full(step(at), Range::new(0, 8 * at + 8));
            assert_eq!(recut(columns), (0..steps).map(rows).collect::<Vec<_>>());
            let rows: Vec<Band> = (0..steps).map(rows).collect();
            assert_eq!(recut(rows.clone()), rows);
        }
    }

    proptest! {
        /// Cells of a grid, in columns of which each row sees many.
        #[test]
        fn strips_see_the_same(heights in prop::collection::vec(prop::collection::vec(0..6_usize, 2..5), 80..120)) {
            let mut bands = Vec::new();
            for (column, heights) in heights.iter().enumerate() {
                let mut row = 0;
                for (at, height) in heights.iter().enumerate() {
                    if at % 2 == 0 && *height > 0 {
                        bands.push(Band::full(Range::new(row, row + height), Range::new(2 * column, 2 * column + 2)));
                    }
                    row += height;
                }
            }
            bands.push(Band { diag_max: -300, ..Band::full(Range::new(400, 420), Range::new(0, 100)) });
            bands.sort_unstable();
            let cut = recut(bands.clone());
            prop_assert!(cut.len() <= 6 * bands.len());
            prop_assert!(cut.is_sorted());
            for row in 0..30 {
                for column in 0..2 * heights.len() {
                    prop_assert_eq!(sees(&bands, row, column), sees(&cut, row, column), "row {}, column {}", row, column);
                }
            }
            let of_row = |row: usize| cut.iter().filter(|band| band.q_range.start <= row && row < band.q_range.end).count();
            let spans = |row: usize| (0..2 * heights.len()).filter(|&column| sees(&bands, row, column) > 0 && (column == 0 || sees(&bands, row, column - 1) == 0)).count();
            if most_at_once(&bands) > MOST {
                for row in 0..30 {
                    prop_assert_eq!(of_row(row), spans(row));
                }
            }
        }
    }
}
