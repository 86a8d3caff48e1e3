//! The type of masks: slices that were checked against the sequence and each other, and questions about their pairs.

use crate::overlap::find_overlap;
use crate::{AttnSlice, Band, MaskError};

/// The longest sequence of a mask, `2^32 - 1` tokens: every area then fits a `u64`.
pub const MAX_SEQLEN: usize = u32::MAX as usize;

/// A validated mask: slices inside `seqlen_q` x `seqlen_k`, disjoint as sets of pairs.
///
/// It is built from slices with [`Mask::new`], from JSON with [`Mask::from_json`], from text with [`Mask::parse`], or
/// by one of the builders ([`Mask::causal`], [`Mask::sliding_window`], …).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mask {
    seqlen_q: usize,
    seqlen_k: usize,
    slices: Vec<AttnSlice>,
}

impl Mask {
    /// Checks the slices and keeps them in the order given. `O(n log n)` in the number of slices, whatever the
    /// sequence lengths.
    ///
    /// # Errors
    /// A sequence of no tokens or of more than [`MAX_SEQLEN`]; a range outside the sequence, empty or reversed; two
    /// slices that share a pair.
    pub fn new(seqlen_q: usize, seqlen_k: usize, slices: Vec<AttnSlice>) -> Result<Self, MaskError> {
        Self::check_ranges(seqlen_q, seqlen_k, &slices)?;
        let bands: Vec<Band> = slices.iter().map(AttnSlice::band).collect();
        if let Some(overlap) = find_overlap(&bands) {
            let (first, second) = (overlap.first, overlap.second);
            return Err(MaskError::Overlap { first, second, row: overlap.row, col: overlap.col });
        }
        Ok(Self { seqlen_q, seqlen_k, slices })
    }

    /// Everything that [`Mask::new`] refuses but overlaps.
    pub(crate) fn check_ranges(
        seqlen_q: usize,
        seqlen_k: usize,
        slices: &[AttnSlice],
    ) -> Result<(), MaskError> {
        for (axis, seqlen) in [("q", seqlen_q), ("k", seqlen_k)] {
            if seqlen == 0 {
                return Err(MaskError::EmptySequence { axis });
            }
            if seqlen > MAX_SEQLEN {
                return Err(MaskError::SequenceTooLong { axis, seqlen, limit: MAX_SEQLEN });
            }
        }
        for (index, slice) in slices.iter().enumerate() {
            for (axis, range, seqlen) in [("q", slice.q_range, seqlen_q), ("k", slice.k_range, seqlen_k)] {
                let (start, end) = (range.start, range.end);
                if start > end {
                    return Err(MaskError::ReversedRange { index, axis, start, end });
                }
                if end > seqlen {
                    return Err(MaskError::OutOfBounds { index, axis, start, end, seqlen });
                }
                if start == end {
                    return Err(MaskError::EmptyRange { index, axis, at: start });
                }
            }
        }
        Ok(())
    }

    /// Query rows.
    pub fn seqlen_q(&self) -> usize {
        self.seqlen_q
    }

    /// Key rows.
    pub fn seqlen_k(&self) -> usize {
        self.seqlen_k
    }

    /// The slices, in the order given.
    pub fn slices(&self) -> &[AttnSlice] {
        &self.slices
    }

    /// The slices as bands, in the order given.
    pub fn bands(&self) -> impl Iterator<Item = Band> + '_ {
        self.slices.iter().map(AttnSlice::band)
    }

    /// Number of unmasked pairs.
    pub fn area(&self) -> u64 {
        self.slices.iter().map(AttnSlice::area).sum()
    }

    /// Whether query `row` sees key `col`. Looks at every slice: for tests and small masks.
    pub fn contains(&self, row: usize, col: usize) -> bool {
        self.slices.iter().any(|slice| slice.contains(row, col))
    }
}
