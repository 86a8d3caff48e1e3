use counterpoint_mask::{Band, Range};

use crate::KEY_BLOCK;
use crate::outline::RankOutline;
use crate::runs::Runs;
use crate::work::is_rectangle;

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
}

impl Profile {
    /// With at most `cells` pieces between places.
    pub(crate) fn new(outline: &RankOutline, runs: &Runs, cells: usize) -> Self {
        let places = cut_places(outline, runs, cells);
        let rows: Vec<usize> =
            places[..places.len() - 1].iter().map(|&place| outline.remote.row_at(place)).collect();
        let mut cell_area = vec![0_u64; rows.len()];
        let mut local_area = 0;
        // The cell that holds a row; own rows before the first remote one count to the first cell, and are taken out again.
        let cell_of = |row: usize| rows.partition_point(|&start| start <= row).saturating_sub(1);
        for band in &outline.work {
            let mut own = 0;
            let first = outline.own.partition_point(|range| range.end <= band.k_range.start);
            for range in outline.own[first..].iter().take_while(|range| range.start < band.k_range.end) {
                let area = area_within(band, range);
                own += area;
                if !rows.is_empty() {
                    // No place lies inside a range of own rows, so all of it is in one cell.
                    let cell = &mut cell_area[cell_of(range.start)];
                    *cell = cell.wrapping_sub(area);
                }
            }
            local_area += own;
            if rows.is_empty() {
                continue;
            }
            let total = band.area();
            let mut before = 0;
            for cell in cell_of(band.k_range.start)..rows.len() {
                let last = rows.get(cell + 1).is_none_or(|&end| end >= band.k_range.end);
                let until = match last {
                    true => total,
                    false => area_within(band, &Range::new(band.k_range.start, rows[cell + 1])),
                };
                cell_area[cell] = cell_area[cell].wrapping_add(until - before);
                before = until;
                if last {
                    break;
                }
            }
        }
        let mut area_before = Vec::with_capacity(places.len());
        let mut sum = 0;
        area_before.push(0);
        for area in cell_area {
            sum += area;
            area_before.push(sum);
        }
        Self { places, area_before, local_area }
    }
}

/// Unmasked pairs of a trimmed band in the columns of `k`.
fn area_within(band: &Band, k: &Range) -> u64 {
    let part = band.clip(&band.q_range, k);
    if is_rectangle(band) { (part.q_range.len() * part.k_range.len()) as u64 } else { part.area() }
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
        let moved = place - (row - run.range.start.max(remote.ranges[index].start));
        let last = places[cell - 1];
        places.push(if moved > last && moved.is_multiple_of(KEY_BLOCK) { moved } else { place });
    }
    if cells > 0 {
        places.push(remote.len());
    }
    places
}
