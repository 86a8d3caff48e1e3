//! What the ranks of a machine can do with passes of layers, and what these cost there.

use std::sync::Arc;

use counterpoint_cost::CostModel;
use counterpoint_plan::{LinearDirection, LinearPlan, LinearSpec, PlanError, Topology};
use counterpoint_schedule::{PassOverlap, RankTransport};

use super::pass::LinearPass;
use crate::tuned::TunedHere;

/// Whether passes run in a way that no option names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// Never: there are no kernels for it, or it is in the way of something else.
    Never,
    /// Where `tune gemm` has found it to be fastest: no prediction of it has been measured on this kind of machine yet.
    Tuned,
    /// Likewise, and where it is predicted to be.
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
    /// Whether a pass may be chosen to travel in groups of columns: there are kernels that compute one product by columns, and none that do so
    /// with the sum of several.
    pub column_groups: Offered,
    /// Whether a pass may be chosen whose product takes rows as they arrive: it may hold most workers while it waits for other ranks.
    pub arriving_rows: Offered,
}

impl LinearMachine {
    /// Ranks of which nothing was tuned.
    pub fn new(
        transport: RankTransport,
        overlaps: Vec<PassOverlap>,
        topology: Topology,
        cost: CostModel,
    ) -> Self {
        let (column_groups, arriving_rows) = (Offered::Predicted, Offered::Predicted);
        Self { transport, overlaps, topology, cost, tuned: None, column_groups, arriving_rows }
    }

    /// The same, of which no pass is chosen to be one kernel with its collective, or one that waits for rows of other ranks.
    #[must_use]
    pub fn without_waiting_products(mut self) -> Self {
        self.overlaps.retain(|way| !way.is_fused());
        self.with_arriving_rows(Offered::Never)
    }

    /// The same, whose products take rows as they arrive where these are.
    #[must_use]
    pub fn with_arriving_rows(self, arriving_rows: Offered) -> Self {
        Self { arriving_rows, ..self }
    }

    /// The same, whose passes travel in groups of columns where these are.
    #[must_use]
    pub fn with_column_groups(self, column_groups: Offered) -> Self {
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
        let mut found = pass.fastest(&self.overlaps, cost)?;
        if self.arriving_rows == Offered::Predicted {
            found = pass.as_rows_arrive(&self.overlaps, cost, found)?;
        }
        if self.column_groups == Offered::Predicted {
            found = pass.in_columns(&self.overlaps, cost, found)?;
        }
        Ok(found)
    }
}
