//! Figures of a machine that no time can be predicted with.

use thiserror::Error;

/// A figure of a cost model with which no time can be predicted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the cost model's {field} is {value}; it must be {wanted}")]
pub struct CostError {
    /// Which figure.
    pub field: &'static str,
    /// What was given.
    pub value: String,
    /// What it must be.
    pub wanted: String,
}
