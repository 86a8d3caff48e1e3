use crate::{AttnSlice, Band, MaskError};

/// A validated mask: slices inside `seqlen_q` x `seqlen_k`, disjoint as sets of pairs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mask {
    seqlen_q: usize,
    seqlen_k: usize,
    slices: Vec<AttnSlice>,
}

impl Mask {
    /// Checks the slices and keeps them in the order given.
    ///
    /// # Errors
    /// A range outside the sequence, empty or reversed; two slices that share a pair.
    pub fn new(seqlen_q: usize, seqlen_k: usize, slices: Vec<AttnSlice>) -> Result<Self, MaskError> {
        for (index, slice) in slices.iter().enumerate() {
            for (axis, range, seqlen) in [("q", slice.q_range, seqlen_q), ("k", slice.k_range, seqlen_k)] {
                if range.end > seqlen {
                    return Err(MaskError::OutOfBounds {
                        index,
                        axis,
                        start: range.start,
                        end: range.end,
                        seqlen,
                    });
                }
            }
        }
        Ok(Self { seqlen_q, seqlen_k, slices })
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
}
