//! What the simulator expects of a plan: every rank lowered, all ranks simulated together.

use counterpoint_plan::{AttentionSpec, CostModel, Plan, Topology};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, PassPolicies, Program, SimulateError, Timeline,
    lower_attention_backward, lower_attention_forward, simulate,
};

/// The predicted passes of a plan.
#[derive(Clone, Debug)]
pub struct AttentionPrediction {
    /// The forward.
    pub forward: Timeline,
    /// The backward, where it is asked for.
    pub backward: Option<Timeline>,
    /// Bytes that the forward sends between nodes, all ranks together.
    pub forward_crossing_bytes: u64,
    /// Likewise the backward.
    pub backward_crossing_bytes: Option<u64>,
}

impl AttentionPrediction {
    /// Lowers every rank and simulates them together. `backward` says how gradients travel, `None` that there are none.
    ///
    /// # Errors
    /// As [`simulate`]: Programs of one plan fit each other, so none is known.
    pub fn of(
        plan: &Plan,
        spec: &AttentionSpec,
        policies: impl Into<PassPolicies>,
        backward: Option<GradientReduction>,
        topology: &Topology,
        cost: &CostModel,
    ) -> Result<Self, SimulateError> {
        let PassPolicies { forward, backward: of_backward } = policies.into();
        let predict = |programs: Vec<Program>| {
            let crossing = programs.iter().map(|program| program.crossing_bytes(topology)).sum::<u64>();
            simulate(&programs, topology, cost).map(|timeline| (timeline, crossing))
        };
        let (forward, forward_crossing_bytes) = predict(forwards(plan, spec, forward))?;
        let backward = backward.map(|how| predict(backwards(plan, spec, of_backward, how))).transpose()?;
        let (backward, backward_crossing_bytes) = backward.unzip();
        Ok(Self { forward, backward, forward_crossing_bytes, backward_crossing_bytes })
    }

    /// Seconds of the forward and of the backward, where there is one, together.
    pub fn seconds(&self) -> f64 {
        self.forward.makespan() + self.backward.as_ref().map_or(0.0, Timeline::makespan)
    }
}

/// The forwards of all ranks. Where blocks begin changes no prediction.
pub(crate) fn forwards(plan: &Plan, spec: &AttentionSpec, policy: OverlapPolicy) -> Vec<Program> {
    let lower = |rank| lower_attention_forward(plan, rank, spec, policy, KeyBlocks::Suited);
    (0..plan.ranks.len()).map(lower).collect()
}

/// The backwards of all ranks.
pub(crate) fn backwards(
    plan: &Plan,
    spec: &AttentionSpec,
    policy: OverlapPolicy,
    how: GradientReduction,
) -> Vec<Program> {
    (0..plan.ranks.len()).map(|rank| lower_attention_backward(plan, rank, spec, policy, how)).collect()
}
