//! Layers of a mixture of experts from tensors to tensors.

mod layer;
mod reference;
mod run;

pub use self::layer::{ExpertLayer, ExpertOptions, ExpertPass, ExpertPasses};
pub use self::reference::{ExpertInputs, ExpertOutputs, check_experts};
pub use self::run::run_experts_on;
