//! A matrix product with a collective as a linear layer, and a pass of a layer as such a product.

use counterpoint_tiles::gemm::ProblemSize;
use serde::{Deserialize, Serialize};

use crate::{Activations, DType, LinearDirection, LinearKind, LinearSpec};

/// A matrix product and the collective that its communication amounts to. In groups of rows, products and collectives alternate: a gather
/// comes before its group's product, a reduction behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GemmCollective {
    /// The rows of the first operand are gathered, then multiplied.
    AllGather,
    /// Every rank has a partial sum of each sum, which ends on the row's owner.
    ReduceScatter,
    /// Every rank has a partial sum of each sum, which ends on all.
    AllReduce,
}

impl GemmCollective {
    /// All of them, with their names on the command line.
    pub const NAMES: [(&'static str, GemmCollective); 3] = [
        ("all-gather", GemmCollective::AllGather),
        ("reduce-scatter", GemmCollective::ReduceScatter),
        ("all-reduce", GemmCollective::AllReduce),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, named)| *named == self).map_or("", |(name, _)| name)
    }

    /// That of a layer's forward; `None` where it has none.
    pub fn of(spec: &LinearSpec) -> Option<Self> {
        Self::of_pass(spec, LinearDirection::Forward)
    }

    /// That of the product of a pass; `None` where it has none.
    pub fn of_pass(spec: &LinearSpec, direction: LinearDirection) -> Option<Self> {
        let sums = match spec.activations {
            Activations::SequenceParallel => Self::ReduceScatter,
            Activations::Replicated => Self::AllReduce,
        };
        match (direction, spec.kind) {
            (LinearDirection::Forward, LinearKind::Row)
            | (LinearDirection::Backward { .. }, LinearKind::Column) => Some(sums),
            _ => (spec.activations == Activations::SequenceParallel).then_some(Self::AllGather),
        }
    }

    /// The layer whose forward it is, without a bias. `size` is that of all ranks together.
    pub fn layer(self, size: ProblemSize, dtype: DType) -> LinearSpec {
        self.layer_of(LinearDirection::Forward, size, dtype)
    }

    /// The layer in whose forward, or in whose backward's product of `dx`, it is; without a bias. `size` is that of all ranks together.
    pub fn layer_of(self, direction: LinearDirection, size: ProblemSize, dtype: DType) -> LinearSpec {
        let ProblemSize { m, n, k } = size;
        let activations = match self {
            Self::AllGather | Self::ReduceScatter => Activations::SequenceParallel,
            Self::AllReduce => Activations::Replicated,
        };
        let (kind, in_features, out_features) = match (direction, self) {
            (LinearDirection::Forward, Self::AllGather) => (LinearKind::Column, k, n),
            (LinearDirection::Forward, _) => (LinearKind::Row, k, n),
            (LinearDirection::Backward { .. }, Self::AllGather) => (LinearKind::Row, n, k),
            (LinearDirection::Backward { .. }, _) => (LinearKind::Column, n, k),
        };
        LinearSpec { kind, activations, tokens: m, in_features, out_features, has_bias: false, dtype }
    }
}
