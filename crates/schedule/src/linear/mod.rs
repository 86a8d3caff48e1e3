//! Tensor-parallel linear layers as Programs, from the same operations and under the same policies as attention.
//!
//! A pass is cut into groups of tokens (wave groups), or, where it has few and sums travel, of columns. Where sums travel, a group's reduction runs under the products of the
//! groups after it, and in a backward under the gradient of the weight too; where inputs travel, the products of the rank's own
//! tokens hide the first group, and each group's the next. Every group has rows of all ranks, so links are used evenly, and a
//! sum over ranks is formed in one reduction in their order, so that results have the same bits for any number of groups.

mod backward;
mod exchange;
mod forward;
mod layer_part;
mod normalised;
mod parts;
mod reduced;
mod shared_input;
mod travel;

use counterpoint_plan::DType;
use serde::{Deserialize, Serialize};

pub use backward::{lower_linear_backward, lower_linear_weight_gradient};
pub use forward::lower_linear_forward;
pub use layer_part::LayerPart;
pub use normalised::{NormSpec, lower_normalised_backward, lower_normalised_forward};
pub use parts::{MatrixShape, RankOf, lower_collective, lower_join, lower_product, lower_row_passes};
pub use shared_input::{
    InputGradient, SharedInput, lower_shared_input_backward, lower_shared_input_forward,
    lower_shared_input_weight_gradient,
};
pub use travel::travel_seconds;

/// What becomes of the gradient of the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightGradient {
    /// The weight is frozen: there is none, and nothing travels for it.
    Frozen,
    /// It is written to the output `dweight` (and `dbias`), in the layer's type.
    Written,
    /// It is added to the updated buffer `main_grad` (and `main_grad_bias`) of this type, in the product's epilogue.
    Accumulated(DType),
    /// It is written to the updated buffer `main_grad` (and `main_grad_bias`) of this type, over what was there.
    Replaced(DType),
    /// It is computed later, by [`lower_linear_weight_gradient`], from what the backward leaves for it: outputs that begin with
    /// `kept`.
    Deferred,
}
