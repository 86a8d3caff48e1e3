//! The size of a matrix product.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The size of a product in CUTLASS's words: `[m, n] = [m, k] [k, n]`, however the operands lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProblemSize {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Summands of each element, the reduction dimension.
    pub k: usize,
}

impl ProblemSize {
    /// Multiplications and additions.
    pub fn flops(self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

impl From<[usize; 3]> for ProblemSize {
    fn from([m, n, k]: [usize; 3]) -> Self {
        Self { m, n, k }
    }
}

impl fmt::Display for ProblemSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} x {}", self.m, self.n, self.k)
    }
}
