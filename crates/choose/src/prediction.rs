//! What the simulator expects of a plan: every rank lowered, all ranks simulated together.

use std::cmp::Reverse;

use counterpoint_plan::{AttentionSpec, Plan, Topology};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OpCost, OverlapPolicy, PassPolicies, Program, SimulateError, Timeline,
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
    pub forward_inter_node_bytes: u64,
    /// Likewise the backward.
    pub backward_inter_node_bytes: Option<u64>,
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
        cost: &(impl OpCost + ?Sized),
    ) -> Result<Self, SimulateError> {
        let PassPolicies { forward, backward: of_backward } = policies.into();
        let ranks: Vec<usize> = (0..plan.ranks.len()).collect();
        let predict = |programs: Vec<Program>| {
            let inter_node = programs.iter().map(|program| program.inter_node_bytes(topology)).sum::<u64>();
            simulate(&programs, topology, cost).map(|timeline| (timeline, inter_node))
        };
        let (forward, forward_inter_node_bytes) = predict(forwards(plan, &ranks, spec, forward))?;
        let backward =
            backward.map(|how| predict(backwards(plan, &ranks, spec, of_backward, how))).transpose()?;
        let (backward, backward_inter_node_bytes) = backward.unzip();
        Ok(Self { forward, backward, forward_inter_node_bytes, backward_inter_node_bytes })
    }

    /// Seconds of the forward and of the backward, where there is one, together.
    pub fn seconds(&self) -> f64 {
        self.forward.makespan() + self.backward.as_ref().map_or(0.0, Timeline::makespan)
    }
}

/// The forwards of these ranks. Where blocks begin changes no prediction.
fn forwards(plan: &Plan, ranks: &[usize], spec: &AttentionSpec, policy: OverlapPolicy) -> Vec<Program> {
    let lower = |&rank: &usize| lower_attention_forward(plan, rank, spec, policy, KeyBlocks::Unaligned);
    ranks.iter().map(lower).collect()
}

/// The backwards of these ranks.
fn backwards(
    plan: &Plan,
    ranks: &[usize],
    spec: &AttentionSpec,
    policy: OverlapPolicy,
    how: GradientReduction,
) -> Vec<Program> {
    ranks.iter().map(|&rank| lower_attention_backward(plan, rank, spec, policy, how)).collect()
}

/// A plan to be simulated again and again: of many ranks those that have most to do stand for all.
pub(crate) struct Trial<'a> {
    plan: &'a Plan,
    spec: &'a AttentionSpec,
    topology: &'a Topology,
    ranks: Vec<usize>,
}

/// Ranks that stand for all: those with the most pairs, and those that receive most.
const PROBED: [usize; 2] = [8, 8];

impl<'a> Trial<'a> {
    pub(crate) fn new(plan: &'a Plan, spec: &'a AttentionSpec, topology: &'a Topology) -> Self {
        let mut ranks: Vec<usize> = (0..plan.ranks.len()).collect();
        if ranks.len() > PROBED.iter().sum() {
            let [areas, receivers] = PROBED;
            let mut by_rows = ranks.clone();
            let recv =
                |rank: &usize| Reverse(plan.ranks[*rank].recv_rows() + plan.ranks[*rank].query_recv_rows());
            ranks.sort_by_key(|rank| Reverse(plan.ranks[*rank].area));
            by_rows.sort_by_key(recv);
            by_rows.retain(|rank| !ranks[..areas].contains(rank));
            ranks.truncate(areas);
            ranks.extend(&by_rows[..receivers]);
            ranks.sort_unstable();
        }
        Self { plan, spec, topology, ranks }
    }

    /// Whether any rows travel.
    pub(crate) fn exchanges(&self) -> bool {
        self.plan.ranks.iter().any(|rank| rank.forward.len() > 1 || rank.hosted.is_some())
    }

    /// Whether rows cross between nodes in steps of their own.
    pub(crate) fn is_two_level(&self) -> bool {
        self.plan.two_level.is_some()
    }

    pub(crate) fn forward(
        &self,
        policy: OverlapPolicy,
        cost: &(impl OpCost + ?Sized),
    ) -> Result<Timeline, SimulateError> {
        simulate(&forwards(self.plan, &self.ranks, self.spec, policy), self.topology, cost)
    }

    pub(crate) fn backward(
        &self,
        policy: OverlapPolicy,
        how: GradientReduction,
        cost: &(impl OpCost + ?Sized),
    ) -> Result<Timeline, SimulateError> {
        simulate(&backwards(self.plan, &self.ranks, self.spec, policy, how), self.topology, cost)
    }
}
