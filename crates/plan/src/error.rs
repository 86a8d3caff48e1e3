use thiserror::Error;

/// Why a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// `chunk_size` is 0.
    #[error("chunk_size is 0; it must be at least 1 row")]
    ZeroChunkSize,
    /// `cp_size` is out of range.
    #[error("cp_size is {cp_size}; it must be between 1 and {max}")]
    CpSize {
        /// What was asked.
        cp_size: usize,
        /// The largest that is supported.
        max: usize,
    },
}
