use counterpoint_plan::{AttentionSpec, Plan, PlanConfig};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, Program, Timeline, lower_attention_backward,
    lower_attention_forward, simulate,
};

use crate::error::CliError;

/// What the simulator expects of a plan.
#[derive(Debug)]
pub(crate) struct Prediction {
    /// The forward.
    pub(crate) forward: Timeline,
    /// The backward, where it is asked for.
    pub(crate) backward: Option<Timeline>,
    /// Bytes that the forward sends between nodes, all ranks together.
    pub(crate) forward_crossing_bytes: u64,
    /// Likewise the backward.
    pub(crate) backward_crossing_bytes: Option<u64>,
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
        let predict = |programs: Vec<Program>| {
            let crossing =
                programs.iter().map(|program| program.crossing_bytes(&config.topology)).sum::<u64>();
            let timeline = simulate(&programs, &config.topology, &config.cost);
            Ok((timeline.map_err(|source| CliError::Predict { source })?, crossing))
        };
        // Where blocks begin changes no prediction.
        let blocks = KeyBlocks::Suited;
        let (forward, forward_crossing_bytes) =
            predict(ranks().map(|r| lower_attention_forward(plan, r, spec, policy, blocks)).collect())?;
        let backward = match backward {
            None => None,
            Some(how) => Some(predict(
                ranks().map(|r| lower_attention_backward(plan, r, spec, policy, how)).collect(),
            )?),
        };
        let (backward, backward_crossing_bytes) = backward.unzip();
        Ok(Self { forward, backward, forward_crossing_bytes, backward_crossing_bytes })
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
