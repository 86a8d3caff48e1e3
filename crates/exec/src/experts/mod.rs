//! Layers of a mixture of experts from tensors to tensors.

mod layer;
mod reference;

pub use self::layer::{ExpertLayer, ExpertOptions, ExpertPass, ExpertPasses};
pub use self::reference::{ExpertInputs, ExpertOutputs, check_experts};
