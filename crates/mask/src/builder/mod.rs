//! The masks that users know by name. Each builder gives few slices, whatever the length of the sequence allows.

mod block;
mod document;
mod question;
mod tree;
mod union;
mod window;

pub use window::Window;

use crate::mask::MAX_SEQLEN;
use crate::{AttnSlice, Mask, MaskError, MaskType, Range};

/// Builders stop here (validating that many takes about 1 GB), instead of running out of memory: one small number
/// in a builder's arguments is enough to ask for billions of slices.
const MAX_SLICES: usize = 1 << 22;

/// The slices of a mask under construction. Slices with an empty range are dropped, so that builders need no special
/// case for documents without tokens.
struct Drawing {
    seqlen_q: usize,
    seqlen_k: usize,
    slices: Vec<AttnSlice>,
}

impl Drawing {
    /// Checks the lengths first: a builder must not lay out slices for a sequence that is too long anyway.
    fn new(seqlen_q: usize, seqlen_k: usize) -> Result<Self, MaskError> {
        for (axis, seqlen) in [("q", seqlen_q), ("k", seqlen_k)] {
            if seqlen > MAX_SEQLEN {
                return Err(MaskError::SequenceTooLong { axis, seqlen, limit: MAX_SEQLEN });
            }
        }
        Ok(Self { seqlen_q, seqlen_k, slices: Vec::new() })
    }

    fn add(&mut self, q_range: Range, k_range: Range, mask_type: MaskType) -> Result<(), MaskError> {
        if q_range.is_empty() || k_range.is_empty() {
            return Ok(());
        }
        if self.slices.len() == MAX_SLICES {
            return Err(MaskError::TooManySlices { limit: MAX_SLICES });
        }
        self.slices.push(AttnSlice { q_range, k_range, mask_type });
        Ok(())
    }

    fn finish(self) -> Result<Mask, MaskError> {
        Mask::new(self.seqlen_q, self.seqlen_k, self.slices)
    }
}
