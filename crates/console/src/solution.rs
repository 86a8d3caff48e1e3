//! A plan as commands make it: solved, timed, and compared where the dispatch is left open.

use std::time::Instant;

use counterpoint_choose::{
    ChooseError, DeviceModel, DispatchAlgorithm, DispatchChoice, PlanConfig, plan_attention, plan_mask_within,
};
use counterpoint_exec::available_memory;
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Plan, PlanError, PlanSummary, Planning, Topology};

use crate::arguments::DispatchAsked;
use crate::console;
use crate::error::CliError;

/// A plan's pieces and those of Programs.
const COPIES: u64 = 2;

/// A plan and the seconds that solving it took.
#[derive(Debug)]
pub struct Solution {
    /// The plan.
    pub plan: Plan,
    /// The dispatch that it has.
    pub dispatch: DispatchAlgorithm,
    /// What the dispatch was chosen from, where it was.
    pub choice: Option<DispatchChoice>,
    /// Seconds of one solve, the only one.
    pub seconds: f64,
}

impl Solution {
    /// Plans `mask`, all ranks' parts, for a machine of this name with the dispatch that was asked for; refused where these and their
    /// Programs, which are about as large, would not fit into memory. Of `config` the dispatch is not looked at.
    pub fn solve(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        (asked, machine): (DispatchAsked, &str),
        planning: &Planning<'_>,
    ) -> Result<Self, CliError> {
        let begin = Instant::now();
        let available = available_memory().unwrap_or(u64::MAX);
        let refused = |source| match source {
            ChooseError::Plan(PlanError::Memory { needed, .. }) => CliError::OutOfMemory {
                what: "a plan with every rank's pieces, and its Programs,",
                needed: needed.saturating_mul(COPIES),
                available,
                instead: "use fewer ranks or a larger --chunk-size; `counterpoint plan` without --report and --program needs figures alone",
            },
            error => CliError::of_choice(error),
        };
        let most = available / COPIES;
        let (plan, dispatch, choice) = match asked {
            DispatchAsked::Named(dispatch) => {
                let config = PlanConfig { dispatch, ..*config };
                (plan_mask_within(mask, spec, &config, most, planning).map_err(refused)?, dispatch, None)
            }
            DispatchAsked::Auto => {
                let model = DeviceModel::for_choices(machine, &config.cost);
                let chosen = plan_attention(mask, spec, config, model, most, planning);
                let (plan, choice) = chosen.map_err(refused)?;
                // Whoever wants rows to cross in two steps says so.
                (Plan { two_level: None, ..plan }, choice.chosen, Some(choice))
            }
        };
        Ok(Self { plan, dispatch, choice, seconds: begin.elapsed().as_secs_f64() })
    }

    /// With rows that cross between nodes in two steps; see [`Plan::over_nodes`].
    pub fn over_nodes(self, topology: &Topology) -> Self {
        let begin = Instant::now();
        let Self { plan, dispatch, choice, seconds } = self;
        let plan = plan.over_nodes(topology);
        Self { plan, dispatch, choice, seconds: seconds + begin.elapsed().as_secs_f64() }
    }

    /// Says when ranks own no rows, which a table of many ranks may hide, and what would give them some.
    pub fn note_idle_ranks(&self) {
        let dispatch = &self.plan.q_dispatch;
        let idle = (0..dispatch.cp_size()).filter(|&rank| dispatch.chunks(rank).is_empty()).count();
        if idle > 0 {
            console::note(&format!(
                "note: {idle} of {} ranks own no rows: the mask has {} of {}; use fewer ranks, or a smaller --chunk-size",
                dispatch.cp_size(),
                console::count(dispatch.num_chunks(), "chunk"),
                console::count(dispatch.chunk_size(), "row"),
            ));
        }
    }

    /// The plan in figures.
    pub fn summary(&self, mask: &Mask, spec: &AttentionSpec) -> PlanSummary {
        PlanSummary::new(&self.plan, mask, spec, self.seconds)
    }
}
