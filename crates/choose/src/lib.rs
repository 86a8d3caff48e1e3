//! Choices by prediction: candidates are lowered and simulated, and the one that is predicted to end first is kept.
//!
//! Pure, as the crates below it: no device, clock, environment or file. Everything that a default does not name is chosen here,
//! and what was chosen says by how much.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod policies;
mod prediction;

pub use policies::{PassChoice, PolicyCandidate, PolicyChoice, attention_policies};
pub use prediction::AttentionPrediction;
