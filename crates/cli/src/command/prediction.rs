use counterpoint_plan::{AttentionSpec, Plan, PlanConfig};
use counterpoint_schedule::{
    GradientReduction, OverlapPolicy, Program, Timeline, lower_attention_backward, lower_attention_forward,
    simulate,
};

use crate::error::CliError;

/// What the simulator expects of a plan.
#[derive(Debug)]
pub(crate) struct Prediction {
    /// The forward.
    pub(crate) forward: Timeline,
    /// The backward, where it is asked for.
    pub(crate) backward: Option<Timeline>,
}

impl Prediction {
    /// Lowers every rank and simulates them together. `backward` says how gradients travel, `None` that there are none.
    pub(crate) fn of(
        plan: &Plan,
        spec: &AttentionSpec,
        policy: OverlapPolicy,
        backward: Option<GradientReduction>,
        config: &PlanConfig,
    ) -> Result<Self, CliError> {
        let ranks = || 0..plan.ranks.len();
        let timeline = |programs: Vec<Program>| {
            simulate(&programs, &config.topology, &config.cost).map_err(|source| CliError::Predict { source })
        };
        let forward = timeline(ranks().map(|r| lower_attention_forward(plan, r, spec, policy)).collect())?;
        let backward = match backward {
            None => None,
            Some(how) => Some(timeline(
                ranks().map(|r| lower_attention_backward(plan, r, spec, policy, how)).collect(),
            )?),
        };
        Ok(Self { forward, backward })
    }
}

/// Seconds after which each rank has nothing left to do.
pub(crate) fn rank_seconds(timeline: &Timeline) -> Vec<f64> {
    let mut seconds = vec![0.0; timeline.world_size];
    for span in &timeline.spans {
        seconds[span.rank] = f64::max(seconds[span.rank], span.end);
    }
    seconds
}
