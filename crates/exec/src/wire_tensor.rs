//! A tensor of a group collective, as ranks agree on it.

use counterpoint_plan::DType;
use serde::{Deserialize, Serialize};

/// One tensor of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireTensor {
    /// Elements of one row.
    pub row_elements: usize,
    /// Type of the input.
    pub dtype: DType,
    /// Type on the wire.
    pub wire: DType,
}
