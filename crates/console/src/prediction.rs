//! What the simulator expects of a plan, with the command line's error.

use counterpoint_choose::{AttentionPrediction, PlanConfig};
use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{GradientReduction, PassPolicies, Timeline};

use crate::error::CliError;

/// As [`AttentionPrediction::of`], on the machine of `config`.
pub fn predict(
    plan: &Plan,
    spec: &AttentionSpec,
    policies: PassPolicies,
    backward: Option<GradientReduction>,
    config: &PlanConfig,
) -> Result<AttentionPrediction, CliError> {
    AttentionPrediction::of(plan, spec, policies, backward, &config.topology, &config.cost)
        .map_err(|source| CliError::Predict { source })
}

/// Seconds after which each rank has nothing left to do.
pub fn rank_seconds(timeline: &Timeline) -> Vec<f64> {
    let mut seconds = vec![0.0; timeline.world_size];
    for span in &timeline.spans {
        seconds[span.rank] = f64::max(seconds[span.rank], span.end);
    }
    seconds
}
