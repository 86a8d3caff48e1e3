//! Masks of overlapping slices, and of bands.

use std::collections::VecDeque;

use super::Drawing;
use crate::{AttnSlice, Band, Mask, MaskError, Range};

impl Mask {
    /// The pairs that at least one of the slices holds. Slices may overlap; a pair that several hold counts once.
    /// `O(n^2)` in the number of slices that share rows.
    ///
    /// # Errors
    /// As [`Mask::new`], but for overlaps.
    pub fn union(seqlen_q: usize, seqlen_k: usize, slices: &[AttnSlice]) -> Result<Self, MaskError> {
        Self::check_ranges(seqlen_q, seqlen_k, slices)?;
        let mut bands: Vec<Band> = slices.iter().filter_map(|slice| slice.band().trim()).collect();
        bands.sort_unstable();
        let mut disjoint: Vec<Band> = Vec::with_capacity(bands.len());
        // Bands come by their first row, so those that ended above can share nothing with what follows.
        let mut open: VecDeque<Band> = VecDeque::new();
        for band in bands {
            open.retain(|other| other.q_range.end > band.q_range.start);
            let mut rest = vec![band];
            for other in &open {
                rest = rest.iter().flat_map(|band| band.without(other)).collect();
            }
            open.extend(rest.iter().copied());
            disjoint.extend(rest);
        }
        Self::from_bands(seqlen_q, seqlen_k, disjoint)
    }

    /// The pairs of disjoint bands, in few slices.
    ///
    /// # Errors
    /// As [`Mask::new`].
    pub fn from_bands(seqlen_q: usize, seqlen_k: usize, bands: Vec<Band>) -> Result<Self, MaskError> {
        let mut drawing = Drawing::new(seqlen_q, seqlen_k)?;
        for slice in Band::merged(bands).iter().flat_map(Band::to_slices) {
            drawing.add(slice.q_range, slice.k_range, slice.mask_type)?;
        }
        drawing.finish()
    }

    /// The pairs for which `seen` is true; it is asked row by row. Rectangles and shapes with diagonal edges are
    /// found, so that a mask that a builder made comes back as about as many slices.
    ///
    /// # Errors
    /// As [`Mask::new`]; [`MaskError::TooManySlices`] for a mask without such shapes.
    pub fn from_dense(
        seqlen_q: usize,
        seqlen_k: usize,
        seen: impl Fn(usize, usize) -> bool,
    ) -> Result<Self, MaskError> {
        let mut bands = Vec::new();
        let mut open: Vec<Growing> = Vec::new();
        for row in 0..seqlen_q {
            let mut next: Vec<Growing> = Vec::new();
            let mut col = 0;
            while col < seqlen_k {
                if !seen(row, col) {
                    col += 1;
                    continue;
                }
                let start = col;
                while col < seqlen_k && seen(row, col) {
                    col += 1;
                }
                let run = Range::new(start, col);
                let grown = open.iter().position(|band| band.step(run).is_some());
                let grown = grown.map(|index| open.swap_remove(index));
                next.push(match grown.and_then(|band| band.step(run)) {
                    Some(band) => band,
                    None => Growing { first_row: row, first: run, last_row: row, last: run, steps: None },
                });
            }
            bands.extend(open.drain(..).map(|band| band.band()));
            if bands.len() > super::MAX_SLICES {
                return Err(MaskError::TooManySlices { limit: super::MAX_SLICES });
            }
            open = next;
        }
        bands.extend(open.into_iter().map(|band| band.band()));
        Self::from_bands(seqlen_q, seqlen_k, bands)
    }
}

/// A band that may go on in the next row.
#[derive(Clone, Copy)]
struct Growing {
    first_row: usize,
    first: Range,
    last_row: usize,
    last: Range,
    /// By how much its left and its right edge move a row, 0 or 1, once there are two rows.
    steps: Option<(usize, usize)>,
}

impl Growing {
    /// With the run of the row below, where that continues both edges.
    fn step(&self, run: Range) -> Option<Self> {
        let step = |from: usize, to: usize| to.checked_sub(from).filter(|&step| step <= 1);
        let steps = (step(self.last.start, run.start)?, step(self.last.end, run.end)?);
        let fits = self.steps.is_none_or(|known| known == steps);
        fits.then_some(Self { last_row: self.last_row + 1, last: run, steps: Some(steps), ..*self })
    }

    fn band(&self) -> Band {
        let (left, right) = self.steps.unwrap_or((0, 0));
        let row = self.first_row as i64;
        Band {
            q_range: Range::new(self.first_row, self.last_row + 1),
            k_range: Range::new(self.first.start, self.last.end),
            diag_min: if left == 1 { self.first.start as i64 - row } else { Band::NO_MIN },
            diag_max: if right == 1 { self.first.end as i64 - 1 - row } else { Band::NO_MAX },
        }
    }
}
