//! A sweep down the rows of a mask that gives each tile the bands which touch it.

use counterpoint_mask::{Band, Range};

use super::nearly_sorted::sort_nearly_sorted;

/// Bands by rows, met while going down the rows: each tile looks only at the bands that touch it.
#[derive(Debug)]
pub(super) struct Sweep<'a> {
    /// Trimmed, ascending by first row.
    bands: &'a [Band],
    /// The first band that is not met yet.
    next: usize,
    /// Bands that may touch rows from here on.
    active: Vec<Band>,
    /// Where the first of them ends.
    first_end: usize,
    /// Where the first band begins that is not met yet.
    next_start: usize,
}

impl<'a> Sweep<'a> {
    pub(super) fn new(bands: &'a [Band]) -> Self {
        Self::with(bands, Vec::with_capacity(bands.len().min(16)))
    }

    /// With a list to use.
    pub(super) fn with(bands: &'a [Band], mut active: Vec<Band>) -> Self {
        debug_assert!(bands.is_sorted_by_key(|band| band.q_range.start));
        active.clear();
        let next_start = bands.first().map_or(usize::MAX, |band| band.q_range.start);
        Self { bands, next: 0, active, first_end: usize::MAX, next_start }
    }

    /// The list that it has used.
    pub(super) fn into_list(self) -> Vec<Band> {
        self.active
    }

    /// The bands that touch `rows`, in no order, and no others when `rows` end no earlier than those of the call before. Neither end of
    /// `rows` may go back from call to call.
    #[inline]
    pub(super) fn touching(&mut self, rows: &Range) -> &[Band] {
        if self.first_end <= rows.start || self.next_start < rows.end {
            self.go_to(rows);
        }
        &self.active
    }

    fn go_to(&mut self, rows: &Range) {
        if self.first_end <= rows.start {
            self.active.retain(|band| band.q_range.end > rows.start);
            let ends = self.active.iter().map(|band| band.q_range.end);
            self.first_end = ends.min().unwrap_or(usize::MAX);
        }
        while let Some(band) = self.bands.get(self.next)
            && band.q_range.start < rows.end
        {
            if band.q_range.end > rows.start {
                self.active.push(*band);
                self.first_end = self.first_end.min(band.q_range.end);
            }
            self.next += 1;
        }
        if self.active.len() > FEW {
            // From tile to tile columns mostly keep their order, and whoever wants bands by columns has little to move.
            sort_nearly_sorted(&mut self.active, |band| first_column(band, rows.start));
        }
        self.next_start = self.bands.get(self.next).map_or(usize::MAX, |band| band.q_range.start);
    }

    /// What the last call of [`Sweep::touching`] gave.
    pub(super) fn touched(&self) -> &[Band] {
        &self.active
    }

    /// Up to where, at most `end`, no further band begins than those that were met.
    pub(super) fn alone_to(&self, end: usize) -> usize {
        self.next_start.min(end)
    }

    /// Up to where rows after `rows`, the last that were asked for, see the same columns as every one of `rows`; their end where not all
    /// of them do.
    pub(super) fn alike_to(&self, rows: &Range) -> usize {
        let alike = self.active.iter().try_fold(self.next_start, |end, band| {
            let is_whole =
                band.is_rectangle() && band.q_range.start <= rows.start && band.q_range.end >= rows.end;
            is_whole.then(|| end.min(band.q_range.end))
        });
        alike.unwrap_or(rows.end).max(rows.end)
    }
}

/// Bands that are put in order by whoever wants them in any.
const FEW: usize = 16;

/// The first column of a trimmed band that is seen from `row` on.
fn first_column(band: &Band, row: usize) -> i64 {
    (band.q_range.start.max(row) as i64 + band.diag_min).max(band.k_range.start as i64)
}

/// The part of a trimmed `band` in `rows`, which it touches, trimmed.
pub(super) fn piece(band: &Band, rows: &Range) -> Option<Band> {
    let part = Band { q_range: band.q_range.intersect(rows), ..*band };
    match band.is_rectangle() {
        // A part of a rectangle is trimmed.
        true => Some(part),
        false => part.trim(),
    }
}
