//! The overlap policy of each pass of attention: all that the transport runs are simulated.

use counterpoint_cost::CostModel;
use counterpoint_plan::{AttentionSpec, Plan, Planning, Topology};
use counterpoint_schedule::{
    GradientReduction, Mover, OpCost, OverlapPolicy, PassPolicies, RankTransport, SimulateError, StartOrder,
    Timeline, Workload,
};

use crate::ChooseError;
use crate::prediction::Trial;
use crate::remembered::{KnownSeconds, RememberedCost};

/// Predictions that differ by less say nothing: of those the simplest policy is kept.
const LEAST_GAIN: f64 = 0.003;

/// A policy, and what it is predicted to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyCandidate {
    /// The policy.
    pub policy: OverlapPolicy,
    /// A transport that runs it.
    pub transport: RankTransport,
    /// Predicted seconds until the last rank is done.
    pub seconds: f64,
}

/// The policy of one pass, with all that it was chosen from.
#[derive(Clone, Debug, PartialEq)]
pub struct PassChoice {
    /// All that can run, the simplest first.
    pub candidates: Vec<PolicyCandidate>,
    chosen: usize,
}

impl PassChoice {
    /// The candidate that is kept.
    pub fn chosen(&self) -> &PolicyCandidate {
        &self.candidates[self.chosen]
    }

    /// Seconds of the pass with nothing side by side.
    pub fn sequential_seconds(&self) -> f64 {
        let sequential = self.candidates.iter().find(|one| !one.policy.overlaps());
        sequential.map_or(f64::INFINITY, |one| one.seconds)
    }

    /// The first of `candidates` that takes no longer than the sequential one, and hardly longer than the fastest.
    fn of(candidates: Vec<PolicyCandidate>) -> Self {
        let mut choice = Self { candidates, chosen: 0 };
        let least = choice.candidates.iter().map(|one| one.seconds).fold(f64::INFINITY, f64::min);
        let limit = (least * (1.0 + LEAST_GAIN)).min(choice.sequential_seconds());
        choice.chosen = choice.candidates.iter().position(|one| one.seconds <= limit).unwrap_or(0);
        choice
    }
}

/// The policies of attention, with what they were chosen from.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyChoice {
    /// Of the forward.
    pub forward: PassChoice,
    /// Of the backward, where there is one.
    pub backward: Option<PassChoice>,
}

impl PolicyChoice {
    /// The policies that are kept; the backward's is the forward's where there is none.
    pub fn policies(&self) -> PassPolicies {
        let forward = self.forward.chosen().policy;
        let backward = self.backward.as_ref().map_or(forward, |backward| backward.chosen().policy);
        PassPolicies { forward, backward }
    }

    /// Predicted seconds of all passes.
    pub fn seconds(&self) -> f64 {
        self.forward.chosen().seconds
            + self.backward.as_ref().map_or(0.0, |backward| backward.chosen().seconds)
    }
}

/// The policy of each pass that is predicted to end first, of those that one of `transports` runs as it is predicted. What is
/// predicted never takes longer than one operation after the other. `backward` says how gradients travel, `None` that there are none.
///
/// Of many ranks those with the most to do are simulated and stand for all. A policy changes no result, so `cost` may be what a machine was measured to do.
/// What is chosen does not depend on `planning`.
///
/// # Errors
/// As [`counterpoint_schedule::simulate`]: Programs of one plan fit each other, so none is known;
/// [`PlanError::Cancelled`](counterpoint_plan::PlanError::Cancelled).
pub fn attention_policies(
    plan: &Plan,
    spec: &AttentionSpec,
    backward: Option<GradientReduction>,
    transports: &[RankTransport],
    topology: &Topology,
    cost: &(impl OpCost + Sync + ?Sized),
    planning: &Planning<'_>,
) -> Result<PolicyChoice, ChooseError> {
    let trial = Trial::new(plan, spec, topology);
    let cost = RememberedCost::new(cost, plan, KnownSeconds::default(), planning);
    policies_of(&trial, backward, transports, &cost, planning)
}

/// [`attention_policies`] of a plan of which some seconds may be known.
pub(crate) fn policies_of(
    trial: &Trial<'_>,
    backward: Option<GradientReduction>,
    transports: &[RankTransport],
    cost: &RememberedCost<'_, impl OpCost + Sync + ?Sized>,
    planning: &Planning<'_>,
) -> Result<PolicyChoice, ChooseError> {
    type Run<'a> = dyn Fn(OverlapPolicy) -> Result<Timeline, SimulateError> + Sync + 'a;
    let choose = |run: &Run<'_>| -> Result<PassChoice, ChooseError> {
        let candidates = candidates(trial, transports, cost.rates());
        let timed = planning.map(candidates.len(), |at| {
            let (policy, transport) = candidates[at];
            Ok(PolicyCandidate { policy, transport, seconds: run(policy)?.makespan() })
        })?;
        let timed = timed.into_iter().collect::<Result<Vec<_>, SimulateError>>()?;
        // Nothing takes any time in what was simulated last, where it was called off meanwhile.
        planning.check()?;
        Ok(PassChoice::of(timed))
    };
    let forward = choose(&|policy| trial.forward(policy, cost))?;
    let backward = backward.map(|how| choose(&|policy| trial.backward(policy, how, cost))).transpose()?;
    Ok(PolicyChoice { forward, backward })
}

/// What is tried, the simplest first, each with a transport that runs it. A priority is predicted as nothing, and one hardware queue is
/// a variable of the process that nothing here can set; a partition needs a driver that has them.
fn candidates(
    trial: &Trial<'_>,
    transports: &[RankTransport],
    cost: &CostModel,
) -> Vec<(OverlapPolicy, RankTransport)> {
    let mut policies = vec![OverlapPolicy::default()];
    if let Some(sharing) = cost.sharing.filter(|_| trial.exchanges()) {
        // A cast and a reduce at a time; on several nodes each is two.
        let collectives = if trial.is_two_level() { 4 } else { 2 };
        for start in StartOrder::ALL.into_iter().filter(|start| start.rules().for_attention) {
            let margins = (0..=collectives).map(|at| at * sharing.communication);
            let policies_of = |margin| OverlapPolicy::new(start).leaving(margin);
            policies.extend(margins.filter(|margin| *margin < sharing.workers).map(policies_of));
        }
        policies.extend(Mover::named_for(Workload::Attention));
        policies.dedup();
    }
    policies.push(OverlapPolicy::SEQUENTIAL);
    let runs = |policy: &OverlapPolicy| RankTransport::any_of(transports, policy, Workload::Attention).ok();
    policies.into_iter().filter_map(|policy| Some((policy, runs(&policy)?))).collect()
}
