//! Sets of rows as ascending ranges.

use counterpoint_mask::Range;

/// The rows of `rows` that are not in `own`. Both ascending and merged, and so is the result.
pub(crate) fn without(rows: &[Range], own: &[Range]) -> Vec<Range> {
    let mut left = Vec::with_capacity(rows.len());
    let mut own = own.iter().peekable();
    for row in rows {
        let mut start = row.start;
        while let Some(mine) = own.peek() {
            if mine.start >= row.end {
                break;
            }
            if mine.start > start {
                left.push(Range::new(start, mine.start));
            }
            start = start.max(mine.end);
            if mine.end > row.end {
                // It may reach into the next range as well.
                break;
            }
            own.next();
        }
        if start < row.end {
            left.push(Range::new(start, row.end));
        }
    }
    left
}
