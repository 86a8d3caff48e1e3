use thiserror::Error;

/// Why a run ended without a result.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ExecError {
    /// A tensor's shape or type is not what the plan needs.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
}
