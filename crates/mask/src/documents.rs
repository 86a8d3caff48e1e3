//! Packed sequences by the cumulative starts (`cu_seqlens`) or the lengths of their documents.

use crate::mask::MAX_SEQLEN;
use crate::{MaskError, Range};

/// The documents that a packed sequence is made of, one after another. A document may have no token.
///
/// A plain sequence is one document: `Documents::from(4096)`, or just `4096` where a builder takes
/// `impl Into<Documents>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Documents {
    /// Cumulative starts: 0, then the end of every document.
    starts: Vec<usize>,
}

impl Documents {
    /// Documents between neighbouring values of `starts` (others call them `cu_seqlens`).
    ///
    /// # Errors
    /// The first value is missing or not 0, or a value is smaller than the one before it.
    pub fn from_starts(starts: Vec<usize>) -> Result<Self, MaskError> {
        if starts.first() != Some(&0) {
            return Err(MaskError::StartsNotAtZero { first: starts.first().copied() });
        }
        for (index, pair) in starts.windows(2).enumerate() {
            if pair[1] < pair[0] {
                return Err(MaskError::StartsDecrease {
                    index: index + 1,
                    previous: pair[0],
                    value: pair[1],
                });
            }
        }
        Ok(Self { starts })
    }

    /// Documents of these lengths.
    ///
    /// # Errors
    /// The lengths add up to more than [`MAX_SEQLEN`].
    pub fn from_lengths(lengths: impl IntoIterator<Item = usize>) -> Result<Self, MaskError> {
        let mut starts = vec![0];
        let mut total: usize = 0;
        for (index, length) in lengths.into_iter().enumerate() {
            total = total
                .checked_add(length)
                .filter(|&total| total <= MAX_SEQLEN)
                .ok_or(MaskError::LengthsTooLong { index, limit: MAX_SEQLEN })?;
            starts.push(total);
        }
        Ok(Self { starts })
    }

    /// Tokens of all documents.
    pub fn seqlen(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Number of documents, those without tokens included.
    pub fn count(&self) -> usize {
        self.starts.len() - 1
    }

    /// Every document's tokens, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range> + '_ {
        self.starts.windows(2).map(|pair| Range { start: pair[0], end: pair[1] })
    }
}

impl From<usize> for Documents {
    fn from(seqlen: usize) -> Self {
        Self { starts: vec![0, seqlen] }
    }
}
