//! The bands that each rank computes: cut out of the mask by owner, then into stages with columns of their key buffers.

use std::cell::OnceCell;

use counterpoint_mask::{Band, Mask, Range};

use crate::runs::Runs;

/// Appends a trimmed `band`, fused with the last one where the two are one band. Cutting makes neighbours follow each
/// other, so looking at the last one finds them.
pub(crate) fn push_fused(bands: &mut Vec<Band>, band: Band) {
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
    if a.is_rectangle() && b.is_rectangle() {
        // The common case by far, and cheap.
        let pairs = |band: &Band| band.q_range.len() * band.k_range.len();
        return (q.len() * k.len() == pairs(a) + pairs(b)).then(|| Band::full(q, k));
    }
    // No row and no column of a band is empty, so bands with a gap between them are never one.
    if q.len() > a.q_range.len() + b.q_range.len() || k.len() > a.k_range.len() + b.k_range.len() {
        return None;
    }
    a.union_of_trimmed(b)
}

/// The bands of every rank: rows are the rank's local query rows, columns are still global key rows. Costs one step for
/// each band and each run of query rows that it crosses.
pub(crate) fn rank_work(mask: &Mask, q_runs: &Runs, ranks: usize) -> Vec<Vec<Band>> {
    let expected = (mask.slices().len() + q_runs.all().len()) / ranks + 4;
    let mut work: Vec<Vec<Band>> = (0..ranks).map(|_| Vec::with_capacity(expected)).collect();
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

/// Segments that a band crosses for each group of them, from which on the columns that all its rows see are looked
/// up group by group: two searches in each then cost less than a loop.
const LOOPED_SEGMENTS: usize = 4;

/// Bands of a stage for which memory is asked at once.
const MOST_EXPECTED: usize = 256;

/// Cuts `work` (local rows, global columns) into stages: columns become rows of the stage's key buffer. `segments` are
/// ascending and disjoint and hold every column of the work.
///
/// The rows of a long causal sequence see nearly all of the segments. Going over these for every band would take time in
/// the square of the number of chunks, but columns that all rows of a band see are one rectangle in each group of a buffer,
/// and those that only some see are no more than its rows on either side.
pub(crate) fn cut_into_stages(work: &[Band], segments: &[KeySegment], stages: usize) -> Vec<Vec<Band>> {
    // Groups are looked for where a band crosses enough segments for a single one.
    let groups: OnceCell<SegmentGroups> = OnceCell::new();
    // Most bands lie in few segments.
    let mut bands: Vec<Vec<Band>> =
        (0..stages).map(|_| Vec::with_capacity((2 * work.len()).min(MOST_EXPECTED))).collect();
    let mut in_range = Vec::with_capacity(segments.len());
    for band in work {
        let k = band.k_range;
        let crossed = overlapping(segments, &k);
        let groups = (crossed.len() > LOOPED_SEGMENTS)
            .then(|| groups.get_or_init(|| SegmentGroups::of(segments)))
            .filter(|groups| crossed.len() > LOOPED_SEGMENTS * groups.ends.len());
        let seen = match groups {
            Some(_) => seen_by_all(band),
            None => Range::new(k.end, k.end),
        };
        cut_columns(band, segments, &Range::new(k.start, seen.start), &mut in_range, &mut bands);
        let Some(groups) = groups.filter(|_| !seen.is_empty()) else { continue };
        for group in groups.iter() {
            let segments = overlapping(group, &seen);
            if let (Some(first), Some(last)) = (segments.first(), segments.last()) {
                let start = first.start + seen.start.saturating_sub(first.range.start);
                let end = last.start + (last.range.end.min(seen.end) - last.range.start);
                push_fused(&mut bands[first.stage], Band::full(band.q_range, Range::new(start, end)));
            }
        }
        cut_columns(band, segments, &Range::new(seen.end, k.end), &mut in_range, &mut bands);
    }
    for stage in &mut bands {
        stage.sort_unstable();
    }
    bands
}

/// The buffers' segments in groups, by stage and place. Those of one lie in one stage's buffer one after the other, their global rows
/// ascending.
struct SegmentGroups {
    placed: Vec<KeySegment>,
    /// Where each group ends.
    ends: Vec<usize>,
}

impl SegmentGroups {
    fn of(segments: &[KeySegment]) -> Self {
        let mut placed = segments.to_vec();
        placed.sort_unstable_by_key(|segment| (segment.stage, segment.start));
        let ascends = |a: &KeySegment, b: &KeySegment| a.stage == b.stage && a.range.start < b.range.start;
        let mut end = 0;
        let ends = placed.chunk_by(ascends).map(|group| {
            end += group.len();
            end
        });
        let ends = ends.collect();
        Self { placed, ends }
    }

    fn iter(&self) -> impl Iterator<Item = &[KeySegment]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| &self.placed[std::mem::replace(&mut start, end)..end])
    }
}

/// Cuts the part of `band` in the columns of `k` segment by segment, in the order of the buffers, so that neighbours meet and
/// are fused. `in_range` is a list to use.
fn cut_columns(
    band: &Band,
    segments: &[KeySegment],
    k: &Range,
    in_range: &mut Vec<KeySegment>,
    bands: &mut [Vec<Band>],
) {
    let mut crossed = overlapping(segments, k);
    if !crossed.is_sorted_by_key(|segment| (segment.stage, segment.start)) {
        in_range.clear();
        in_range.extend_from_slice(crossed);
        in_range.sort_unstable_by_key(|segment| (segment.stage, segment.start));
        crossed = in_range;
    }
    for segment in crossed {
        let part = band.clip(&band.q_range, &segment.range.intersect(k));
        // A part of a rectangle is a rectangle, and trimmed.
        let part = if band.is_rectangle() { Some(part) } else { part.trim() };
        if let Some(part) = part {
            let to_buffer = segment.start as i64 - segment.range.start as i64;
            push_fused(&mut bands[segment.stage], part.shift(0, to_buffer));
        }
    }
}

/// The segments that hold a row of `k`; none when it is empty.
fn overlapping<'a>(segments: &'a [KeySegment], k: &Range) -> &'a [KeySegment] {
    if k.is_empty() {
        return &[];
    }
    let first = segments.partition_point(|segment| segment.range.end <= k.start);
    let count = segments[first..].partition_point(|segment| segment.range.start < k.end);
    &segments[first..first + count]
}

/// The columns that every row of `band` sees; empty at the end of its columns when there are none.
fn seen_by_all(band: &Band) -> Range {
    let (q, k) = (band.q_range, band.k_range);
    let start = (q.end as i64 - 1 + band.diag_min).max(k.start as i64);
    let end = (q.start as i64 + band.diag_max + 1).min(k.end as i64);
    if start < end { Range::new(start as usize, end as usize) } else { Range::new(k.end, k.end) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Global key rows in pieces of a few rows, each in some stage's buffer, in order.
    fn segments(pieces: &[(usize, usize)], stages: usize) -> Vec<KeySegment> {
        let (mut row, mut filled) = (0, vec![0; stages]);
        let segments = pieces.iter().map(|&(rows, stage)| {
            let stage = stage % stages;
            let segment = KeySegment { range: Range::new(row, row + rows), stage, start: filled[stage] };
            row += rows;
            filled[stage] += rows;
            segment
        });
        segments.collect()
    }

    proptest! {
        /// Every pair of a band is in one band of the stage that its column belongs to, whatever path cut it.
        #[test]
        fn stages_hold_every_pair_once(
            pieces in proptest::collection::vec((1..4_usize, 0..3_usize), 1..80),
            stages in 1..4_usize,
            drawn in proptest::collection::vec((1..9_usize, 0..200_usize, 1..200_usize, -150..60_i64, 0..400_i64, 0..3_u8), 1..6),
        ) {
            let segments = segments(&pieces, stages);
            let seqlen = segments.last().map_or(0, |segment| segment.range.end);
            let mut row = 0;
            let work: Vec<Band> = drawn
                .iter()
                .filter_map(|&(rows, start, cols, min, width, limits)| {
                    let q_range = Range::new(row, row + rows);
                    row += rows;
                    let start = start % seqlen;
                    let k_range = Range::new(start, (start + cols).min(seqlen));
                    let diag_min = if limits == 1 { min } else { Band::NO_MIN };
                    let diag_max = if limits > 0 { min + width } else { Band::NO_MAX };
                    Band { q_range, k_range, diag_min, diag_max }.trim()
                })
                .collect();
            let mut wanted = vec![BTreeSet::new(); stages];
            for segment in &segments {
                for col in segment.range.start..segment.range.end {
                    for band in &work {
                        let rows = band.q_range.start..band.q_range.end;
                        let to_buffer = segment.start + (col - segment.range.start);
                        wanted[segment.stage].extend(rows.filter(|&row| band.contains(row, col)).map(|row| (row, to_buffer)));
                    }
                }
            }
            let cut = cut_into_stages(&work, &segments, stages);
            for (bands, wanted) in cut.iter().zip(&wanted) {
                prop_assert!(bands.is_sorted() && bands.iter().all(|band| band.trim() == Some(*band)));
                let mut pairs = BTreeSet::new();
                for band in bands {
                    for row in band.q_range.start..band.q_range.end {
                        let columns = band.columns(row);
                        pairs.extend((columns.start..columns.end).map(|col| (row, col)));
                    }
                }
                prop_assert_eq!(&pairs, wanted);
                prop_assert_eq!(bands.iter().map(Band::area).sum::<u64>(), wanted.len() as u64);
            }
        }
    }

    /// Rows that see everything before them, dealt in turn: every band crosses half of the segments. One step for each of
    /// these would be a billion steps.
    #[test]
    fn cutting_does_not_take_the_square_of_the_chunks() {
        let rows = 1 << 15;
        let dealt: Vec<(usize, usize)> = (0..2 * rows).map(|row| (1, row % 2)).collect();
        let segments = segments(&dealt, 2);
        let work: Vec<Band> =
            (0..rows).map(|row| Band::full(Range::new(row, row + 1), Range::new(0, 2 * row + 1))).collect();
        let timed = || {
            let started = std::time::Instant::now();
            let bands = cut_into_stages(&work, &segments, 2);
            (started.elapsed().as_secs_f64(), bands)
        };
        // A busy machine may take a thread away for longer; it does so not every time.
        let mut attempts = std::iter::repeat_with(timed).take(20).skip_while(|(seconds, _)| *seconds >= 0.5);
        let (_, bands) = attempts.next().expect("none of 20 took less than half a second");
        let area = |stage: usize| bands[stage].iter().map(Band::area).sum::<u64>();
        let rows = rows as u64;
        assert_eq!((area(0), area(1)), (rows * (rows + 1) / 2, rows * (rows - 1) / 2));
    }
}
