use std::time::Instant;

use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Plan, PlanConfig, PlanSummary, Topology};

use crate::error::CliError;

/// A plan and the seconds that solving it took.
#[derive(Debug)]
pub(crate) struct Solution {
    /// The plan.
    pub(crate) plan: Plan,
    /// Seconds of one solve, the only one.
    pub(crate) seconds: f64,
}

impl Solution {
    /// Plans `mask`, all ranks' parts.
    pub(crate) fn solve(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<Self, CliError> {
        let begin = Instant::now();
        let plan = Plan::new(mask, spec, config).map_err(|source| CliError::Plan { source })?;
        Ok(Self { plan, seconds: begin.elapsed().as_secs_f64() })
    }

    /// With rows that cross between nodes in two steps; see [`Plan::over_nodes`].
    pub(crate) fn over_nodes(self, topology: &Topology) -> Self {
        let begin = Instant::now();
        let plan = self.plan.over_nodes(topology);
        Self { plan, seconds: self.seconds + begin.elapsed().as_secs_f64() }
    }

    /// The plan in figures.
    pub(crate) fn summary(&self, mask: &Mask, spec: &AttentionSpec) -> PlanSummary {
        PlanSummary::new(&self.plan, mask, spec, self.seconds)
    }
}
