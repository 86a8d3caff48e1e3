//! What the ranks of a machine can do with passes of linear layers, and what these cost there.

use crate::{
    CostModel, LinearDirection, LinearPass, LinearPlan, LinearSpec, PassOverlap, PlanError, Topology,
};

/// What the ranks of a machine can do with passes of linear layers, and what these cost there.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearMachine {
    /// The ways in which a pass can be run, of equally fast ones the preferred first.
    pub overlaps: Vec<PassOverlap>,
    /// Ranks and nodes.
    pub topology: Topology,
    /// What work costs where nobody has measured it: the same on all ranks.
    pub cost: CostModel,
}

impl LinearMachine {
    /// The way and the groups of a pass that are predicted to end first, by `cost`.
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub fn fastest(
        &self,
        spec: LinearSpec,
        direction: LinearDirection,
        cost: &CostModel,
    ) -> Result<(PassOverlap, LinearPlan), PlanError> {
        LinearPass { spec, topology: self.topology, direction }.fastest(&self.overlaps, cost)
    }
}
