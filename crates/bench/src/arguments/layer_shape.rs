//! The shape of a tensor-parallel layer, as `bench tp` takes and prints it.

use std::fmt;

use counterpoint_console::arguments::{ValueFault, value};
use serde::{Deserialize, Serialize};

/// A layer's tokens, features of the side that is not split, and features that a rank has of the other. JSON has the three as an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[usize; 3]", into = "[usize; 3]")]
pub(crate) struct LayerShape {
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) local: usize,
}

impl LayerShape {
    /// `8k:8k:7k`.
    pub(super) fn parse(text: &str) -> Result<Self, ValueFault> {
        value::sizes(text).map(Self::from)
    }
}

impl From<[usize; 3]> for LayerShape {
    fn from([tokens, hidden, local]: [usize; 3]) -> Self {
        Self { tokens, hidden, local }
    }
}

impl From<LayerShape> for [usize; 3] {
    fn from(LayerShape { tokens, hidden, local }: LayerShape) -> Self {
        [tokens, hidden, local]
    }
}

impl fmt::Display for LayerShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, hidden, local } = self;
        write!(f, "{tokens}:{hidden}:{local}")
    }
}
