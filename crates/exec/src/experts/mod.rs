//! Layers of a mixture of experts from tensors to tensors.

mod layer;
mod overlap;
mod run;

use crate::HostTensor;

pub use self::layer::{ExpertLayer, ExpertOptions};
pub use self::overlap::{ExpertOverlap, ExpertPass, ExpertPasses};
pub use self::run::run_experts_on;

/// Tensors of a layer of experts: of activations each rank's, of weights those of all experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertInputs {
    /// Of a dispatch `[tokens, in_features]`, of a combine `[rows, in_features]`.
    pub x: Vec<HostTensor>,
    /// `[experts x out_features, in_features]`
    pub weight: HostTensor,
    /// As `y`, for a backward.
    pub dy: Option<Vec<HostTensor>>,
    /// What gradients of the weights are added to, as the weights.
    pub main_grad: Option<HostTensor>,
}

/// Results of a layer of experts, likewise.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertOutputs {
    /// Of a dispatch `[rows, out_features]`, of a combine `[tokens, out_features]`.
    pub y: Vec<HostTensor>,
    /// As `x`.
    pub dx: Option<Vec<HostTensor>>,
    /// As the weights: the gradient, or what it was added to.
    pub dweight: Option<HostTensor>,
}
