//! What the ranks of a machine can do with passes of layers, and what these cost there.

use std::sync::Arc;

use counterpoint_cost::CostModel;
use counterpoint_plan::{LinearDirection, LinearPlan, LinearSpec, PlanError, Topology};
use counterpoint_schedule::{PassOverlap, RankTransport};

use super::pass::LinearPass;
use crate::tuned::TunedHere;

/// Whether passes travel in groups of columns where nobody names any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnGroups {
    /// Never: there are kernels that compute one product by columns, and none that do so with the sum of several.
    Never,
    /// Where `tune gemm` has found them to be fastest: no prediction of them has been measured on this kind of machine yet.
    Tuned,
    /// Likewise, and where they are predicted to be.
    Predicted,
}

/// What the ranks of a machine can do with passes of linear layers and of layers of experts, and what these cost there.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearMachine {
    /// How its ranks exchange rows, which says how passes of layers of experts can be run.
    pub transport: RankTransport,
    /// The ways in which a pass can be run, of equally fast ones the preferred first.
    pub overlaps: Vec<PassOverlap>,
    /// Ranks and nodes.
    pub topology: Topology,
    /// What work costs where nobody has measured it: the same on all ranks.
    pub cost: CostModel,
    /// What was tuned for layers on it, which comes before what is predicted.
    pub tuned: Option<Arc<TunedHere>>,
    /// Whether a pass may be chosen to travel in groups of columns.
    pub column_groups: ColumnGroups,
}

impl LinearMachine {
    /// Ranks of which nothing was tuned.
    pub fn new(
        transport: RankTransport,
        overlaps: Vec<PassOverlap>,
        topology: Topology,
        cost: CostModel,
    ) -> Self {
        Self { transport, overlaps, topology, cost, tuned: None, column_groups: ColumnGroups::Predicted }
    }

    /// The same, of which no pass is chosen to be one kernel with its collective.
    #[must_use]
    pub fn without_fused(mut self) -> Self {
        self.overlaps.retain(|way| !way.is_fused());
        self
    }

    /// The same, whose passes travel in groups of columns where these are.
    #[must_use]
    pub fn with_column_groups(self, column_groups: ColumnGroups) -> Self {
        Self { column_groups, ..self }
    }

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
        let pass = LinearPass { spec, topology: self.topology, direction };
        let found = pass.fastest(&self.overlaps, cost)?;
        match self.column_groups {
            ColumnGroups::Predicted => pass.in_columns(&self.overlaps, cost, found),
            ColumnGroups::Never | ColumnGroups::Tuned => Ok(found),
        }
    }
}
