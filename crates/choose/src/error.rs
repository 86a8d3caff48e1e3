//! Why nothing could be chosen.

use counterpoint_plan::PlanError;
use counterpoint_schedule::SimulateError;
use thiserror::Error;

/// Why nothing could be chosen.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChooseError {
    /// No plan can be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plan's Programs cannot be simulated; none is known.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}
