//! One rank's remote rows as the stage solver sees them: places to cut at, and work before each.

use counterpoint_mask::Range;
use counterpoint_plan::{KEY_BLOCK, RankOutline, Runs};

use super::columns::Columns;

/// A rank's remote work along its list of remote rows: where it may be cut, and how much work lies before each place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Profile {
    /// Where the list may be cut: ascending, from 0 to its length, multiples of [`KEY_BLOCK`] but for the last. Only `[0]`
    /// when the list is empty.
    pub(crate) places: Vec<usize>,
    /// Unmasked pairs in columns before each place.
    pub(crate) area_before: Vec<u64>,
    /// Unmasked pairs in the rank's own columns.
    pub(crate) local_area: u64,
    /// Unmasked pairs of the hosted work, which follows.
    pub(crate) hosted_area: u64,
}

impl Profile {
    /// With at most `cells` pieces between places.
    pub(crate) fn new(outline: &RankOutline, runs: &Runs, cells: usize) -> Self {
        let places = cut_places(outline, runs, cells);
        let remote = places.windows(2).enumerate().flat_map(|(cell, ends)| {
            let ranges = outline.remote.rows(ends[0], ends[1]);
            ranges.into_iter().map(move |range| (range, Some(cell)))
        });
        let mut pieces: Vec<(Range, Option<usize>)> =
            outline.own.iter().map(|&range| (range, None)).chain(remote).collect();
        pieces.sort_unstable_by_key(|(range, _)| range.start);
        let mut columns = Columns::new(&outline.work);
        let mut area_before = vec![0; places.len()];
        let mut local_area = 0;
        for (range, cell) in pieces {
            let area = columns.area(&range);
            match cell {
                Some(cell) => area_before[cell + 1] += area,
                None => local_area += area,
            }
        }
        for place in 1..area_before.len() {
            area_before[place] += area_before[place - 1];
        }
        let hosted_area = outline.hosted.as_ref().map_or(0, |hosted| hosted.area);
        Self { places, area_before, local_area, hosted_area }
    }
}

/// About evenly spread places. One inside an owner's run moves to the run's beginning where it can: an owned range that
/// no rank cuts travels as one piece, and a thousand ranks would otherwise cut it in a thousand places.
fn cut_places(outline: &RankOutline, runs: &Runs, cells: usize) -> Vec<usize> {
    let remote = &outline.remote;
    let blocks = remote.len().div_ceil(KEY_BLOCK);
    let cells = cells.min(blocks);
    let mut places = Vec::with_capacity(cells + 1);
    places.push(0);
    for cell in 1..cells {
        let place = blocks * cell / cells * KEY_BLOCK;
        let index = remote.range_at(place);
        let row = remote.row_at(place);
        let run = &runs.overlapping(&Range::new(row, row + 1))[0];
        let moved = place - (row - run.range.start.max(remote.ranges()[index].start));
        let last = places[cell - 1];
        places.push(if moved > last && moved.is_multiple_of(KEY_BLOCK) { moved } else { place });
    }
    if cells > 0 {
        places.push(remote.len());
    }
    places
}
