use thiserror::Error;

/// Why a mask is not valid. Every variant names the slice and the values.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MaskError {
    /// A slice reaches past the sequence.
    #[error("slice {index}: {axis} range [{start}, {end}) is outside the sequence of {seqlen} tokens")]
    OutOfBounds {
        /// Index of the slice.
        index: usize,
        /// `q` or `k`.
        axis: &'static str,
        /// Start of the range.
        start: usize,
        /// End of the range.
        end: usize,
        /// Length of that axis.
        seqlen: usize,
    },
}
