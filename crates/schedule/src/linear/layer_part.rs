//! What the operations of a layer's passes are for, and how their labels say it: in Programs, and in the timelines of their runs.

use crate::{Span, SpanKind};

/// What an operation of a layer's pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerPart {
    /// A product of the inputs, or of their gradients.
    Product,
    /// The gradient of the weight.
    WeightGradient,
    /// That of the bias.
    BiasGradient,
    /// An RMSNorm behind the layer.
    Norm,
    /// Its gradients.
    NormGradient,
    /// Rows of tokens to all ranks: of inputs that are gathered, or of sums that were reduced before.
    Gather,
    /// The inputs again, in a backward.
    GatherInputs,
    /// Partial sums to the owners of their rows.
    Reduce,
    /// A wait for one of them.
    Wait,
}

/// Those that one label names; groups of products have others.
const NAMED: [(LayerPart, &str); 7] = [
    (LayerPart::WeightGradient, "dweight"),
    (LayerPart::BiasGradient, "dbias"),
    (LayerPart::Norm, "normalise"),
    (LayerPart::NormGradient, "dnorm"),
    (LayerPart::Gather, "all-gather"),
    (LayerPart::GatherInputs, "all-gather x"),
    (LayerPart::Reduce, "reduce-scatter"),
];

impl LayerPart {
    /// The label of its operations; empty where they have one each.
    pub(crate) fn label(self) -> &'static str {
        NAMED.iter().find(|(part, _)| *part == self).map_or("", |(_, label)| label)
    }

    /// Whether this label is that of its operations.
    pub(crate) fn names(self, label: &str) -> bool {
        NAMED.contains(&(self, label))
    }

    /// What an operation of a run was for.
    pub fn of(span: &Span) -> Self {
        let named = NAMED.iter().find(|(_, label)| *label == span.label).map(|(part, _)| *part);
        match (span.kind, named) {
            (SpanKind::Wait, _) => Self::Wait,
            (SpanKind::Communication, Some(part @ (Self::Reduce | Self::Gather))) => part,
            (SpanKind::Communication, _) => Self::GatherInputs,
            (SpanKind::Compute, Some(part @ (Self::WeightGradient | Self::BiasGradient))) => part,
            (SpanKind::Compute, Some(part @ (Self::Norm | Self::NormGradient))) => part,
            (SpanKind::Compute, _) => Self::Product,
        }
    }
}
