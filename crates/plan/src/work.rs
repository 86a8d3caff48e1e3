use counterpoint_mask::{Band, Mask, Range};

use crate::runs::Runs;

/// Whether a trimmed band is a whole rectangle.
pub(crate) fn is_rectangle(band: &Band) -> bool {
    band.diag_min == Band::NO_MIN && band.diag_max == Band::NO_MAX
}

/// Appends a trimmed `band`, fused with the last one where the two are one band. Cutting makes neighbours follow each
/// other, so looking at the last one finds them.
fn push_fused(bands: &mut Vec<Band>, band: Band) {
    if let Some(last) = bands.last_mut()
        && let Some(union) = fuse(last, &band)
    {
        *last = union;
        return;
    }
    bands.push(band);
}

/// The union of two trimmed bands that share no pair, when it is a band.
fn fuse(a: &Band, b: &Band) -> Option<Band> {
    let (q, k) = (a.q_range.hull(&b.q_range), a.k_range.hull(&b.k_range));
    if is_rectangle(a) && is_rectangle(b) {
        // The common case by far, and cheap.
        let pairs = |band: &Band| band.q_range.len() * band.k_range.len();
        return (q.len() * k.len() == pairs(a) + pairs(b)).then(|| Band::full(q, k));
    }
    // No row and no column of a band is empty, so bands with a gap between them are never one.
    if q.len() > a.q_range.len() + b.q_range.len() || k.len() > a.k_range.len() + b.k_range.len() {
        return None;
    }
    a.union(b)
}

/// The bands of every rank: rows are the rank's local query rows, columns are still global key rows. Costs one step for
/// each band and each run of query rows that it crosses.
pub(crate) fn rank_work(mask: &Mask, q_runs: &Runs, ranks: usize) -> Vec<Vec<Band>> {
    let mut work: Vec<Vec<Band>> = vec![Vec::new(); ranks];
    for band in mask.bands() {
        let Some(band) = band.trim() else { continue };
        for run in q_runs.overlapping(&band.q_range) {
            if let Some(piece) = band.clip(&run.range, &band.k_range).trim() {
                let to_local = run.local_start as i64 - run.range.start as i64;
                push_fused(&mut work[run.rank as usize], piece.shift(to_local, 0));
            }
        }
    }
    work
}

/// The key rows that `work` reads, merged and ascending.
pub(crate) fn needed_rows(work: &[Band]) -> Vec<Range> {
    // Every column of a trimmed band is read by some row, so the union of the column ranges is exact.
    Range::merged(work.iter().map(|band| band.k_range).collect())
}

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

/// A list of global rows, ascending, numbered by their place in the list.
#[derive(Clone, Debug)]
pub(crate) struct RowList {
    /// Merged and ascending.
    pub(crate) ranges: Vec<Range>,
    /// Place of each range's first row, and the length of the list at the end.
    places: Vec<usize>,
}

impl RowList {
    pub(crate) fn new(ranges: Vec<Range>) -> Self {
        let mut places = Vec::with_capacity(ranges.len() + 1);
        let mut place = 0;
        for range in &ranges {
            places.push(place);
            place += range.len();
        }
        places.push(place);
        Self { ranges, places }
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.places[self.ranges.len()]
    }

    /// The range that holds the row at `place`, which must be below the length.
    pub(crate) fn range_at(&self, place: usize) -> usize {
        self.places.partition_point(|&start| start <= place) - 1
    }

    /// The global row at `place`, which must be below the length.
    pub(crate) fn row_at(&self, place: usize) -> usize {
        let index = self.range_at(place);
        self.ranges[index].start + (place - self.places[index])
    }

    /// The rows at places `[start, end)`, merged and ascending.
    pub(crate) fn rows(&self, start: usize, end: usize) -> Vec<Range> {
        if start >= end {
            return Vec::new();
        }
        let (first, last) = (self.range_at(start), self.range_at(end - 1));
        let mut rows = self.ranges[first..=last].to_vec();
        let count = rows.len();
        rows[count - 1].end = self.ranges[last].start + (end - self.places[last]);
        rows[0].start += start - self.places[first];
        rows
    }
}

/// Global key rows that lie together in one stage's key buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeySegment {
    /// Global key rows.
    pub(crate) range: Range,
    /// The stage.
    pub(crate) stage: usize,
    /// Row of the stage's key buffer that holds `range.start`.
    pub(crate) start: usize,
}

/// Cuts `work` (local rows, global columns) into stages: columns become rows of the stage's key buffer. `segments` are
/// ascending and disjoint and hold every column of the work.
pub(crate) fn cut_into_stages(work: &[Band], segments: &[KeySegment], stages: usize) -> Vec<Vec<Band>> {
    let mut bands: Vec<Vec<Band>> = vec![Vec::new(); stages];
    for band in work {
        let first = segments.partition_point(|segment| segment.range.end <= band.k_range.start);
        for segment in segments[first..].iter().take_while(|segment| segment.range.start < band.k_range.end) {
            let part = band.clip(&band.q_range, &segment.range);
            // A part of a rectangle is a rectangle, and trimmed.
            let part = if is_rectangle(band) { Some(part) } else { part.trim() };
            if let Some(part) = part {
                let to_buffer = segment.start as i64 - segment.range.start as i64;
                push_fused(&mut bands[segment.stage], part.shift(0, to_buffer));
            }
        }
    }
    for stage in &mut bands {
        stage.sort_unstable();
    }
    bands
}
