//! Tensor-parallel linear layers: which axis of the weight is split, how activations lie, and the products of each pass.

use counterpoint_tiles::gemm::ProblemSize;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{DType, PlanError, bytes};

/// Which axis of the weight `[out_features, in_features]` is split over the ranks (Megatron-LM, section 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearKind {
    /// Output features: every rank has all tokens of the input and some columns of the output.
    Column,
    /// Input features: every rank has some columns of the input, and a partial sum of every output, which are summed.
    Row,
}

/// What a rank has of the activations that are not split by features: the input of a column-parallel layer, the output of a
/// row-parallel one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// All tokens, the same on every rank: sums are all-reduced.
    Replicated,
    /// Its own tokens (sequence parallelism, Korthikanti et al. 2022): inputs are all-gathered, sums reduce-scattered.
    SequenceParallel,
}

/// Which pass of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearDirection {
    /// `y`.
    Forward,
    /// `dx`, and the gradient of the weight unless the weight is frozen or its gradient is deferred.
    Backward {
        /// Whether the pass computes it.
        weight_gradient: bool,
    },
}

impl fmt::Display for LinearKind {
    /// The name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LinearKind::Column => "column",
            LinearKind::Row => "row",
        })
    }
}

impl fmt::Display for Activations {
    /// The name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Activations::Replicated => "replicated",
            Activations::SequenceParallel => "sequence-parallel",
        })
    }
}

/// The sizes of a linear layer, those of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearSize {
    /// Rows of `x`.
    pub tokens: usize,
    /// Columns of `x`.
    pub in_features: usize,
    /// Columns of `y`.
    pub out_features: usize,
}

/// A linear layer `y = x W^T + bias` over the ranks of a tensor-parallel group. `x` is `[tokens, in_features]`, `y` is
/// `[tokens, out_features]`, `W` is `[out_features, in_features]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearSpec {
    /// The axis that is split.
    pub kind: LinearKind,
    /// How activations lie.
    pub activations: Activations,
    /// Rows of `x`, of all ranks.
    pub tokens: usize,
    /// Columns of `x`, of all ranks.
    pub in_features: usize,
    /// Columns of `y`, of all ranks.
    pub out_features: usize,
    /// Whether there is a bias. A row-parallel layer adds it once, on rank 0's partial sum.
    pub has_bias: bool,
    /// Type of activations, weight and bias.
    pub dtype: DType,
}

impl LinearSpec {
    /// Its sizes.
    pub fn size(&self) -> LinearSize {
        let Self { tokens, in_features, out_features, .. } = *self;
        LinearSize { tokens, in_features, out_features }
    }

    /// Checks that what travels of it can be counted, on so many ranks.
    ///
    /// # Errors
    /// [`PlanError::Bytes`].
    pub fn check_bytes(&self, tp_size: usize) -> Result<(), PlanError> {
        let [tokens, inputs, outputs] =
            [self.tokens, self.in_features, self.out_features].map(|size| size as f64);
        let elements = [[tokens, inputs], [tokens, outputs], [inputs, outputs]];
        bytes::check(tp_size, elements, 2 * self.dtype.accumulator().size())
    }

    /// A rank's product of so many rows in the forward.
    pub fn product_size(&self, rows: usize, tp_size: usize) -> ProblemSize {
        let (n, k) = match self.kind {
            LinearKind::Column => (self.out_features / tp_size, self.in_features),
            LinearKind::Row => (self.out_features, self.in_features / tp_size),
        };
        ProblemSize { m: rows, n, k }
    }

    /// A rank's product of so many rows in a pass: that of `y`, or of `dx`.
    pub fn product_of(&self, direction: LinearDirection, rows: usize, tp_size: usize) -> ProblemSize {
        let forward = self.product_size(rows, tp_size);
        match direction {
            LinearDirection::Forward => forward,
            LinearDirection::Backward { .. } => ProblemSize { n: forward.k, k: forward.n, ..forward },
        }
    }

    /// A rank's product of the gradient of the weight.
    pub fn weight_gradient_size(&self, tp_size: usize) -> ProblemSize {
        let ProblemSize { n, k, .. } = self.product_size(self.tokens, tp_size);
        ProblemSize { m: n, n: k, k: self.tokens }
    }

    /// The pass whose collectives matter most: the forward, or the backward of a layer whose forward has none.
    pub fn communicating_pass(&self) -> LinearDirection {
        match (self.kind, self.activations) {
            (LinearKind::Column, Activations::Replicated) => {
                LinearDirection::Backward { weight_gradient: true }
            }
            _ => LinearDirection::Forward,
        }
    }

    /// Columns of the rows that travel.
    pub fn travelling_columns(&self) -> usize {
        match self.kind {
            LinearKind::Column => self.in_features,
            LinearKind::Row => self.out_features,
        }
    }
}
