//! How a pass of a layer of a mixture of experts is run: policies and groups of tokens are simulated, the best is kept.

use std::sync::Arc;

use counterpoint_cost::CostModel;
use counterpoint_plan::{ExpertGroups, ExpertPlan, ExpertSpec, Routing, Topology};
use counterpoint_schedule::{
    Mover, OpCost, OverlapPolicy, Program, RankTransport, SimulateError, StartOrder, Timeline,
    WeightGradient, Workload, lower_expert_backward, lower_expert_forward, simulate,
};

use crate::linear::LinearMachine;
use crate::tuned::{TunedExpertShape, TunedPass};

/// Numbers of groups that are tried: each costs the start of a collective and of a product.
const COUNTS: [usize; 6] = [1, 2, 3, 4, 6, 8];
/// Percents by which groups grow that are tried: small first groups where products wait for what arrives, small last ones where it is
/// sent.
const GROWTHS: [u32; 5] = [100, 150, 200, 66, 50];
/// Rows of an expert in a group, on average: kernels compute tiles of as many and more, so fewer cost what these do.
const LEAST_ROWS: usize = 64;
/// Of all policies that many are tried in all groups.
const FINALISTS: usize = 2;
/// Predictions that differ by less say nothing: of those the simplest is kept.
const LEAST_GAIN: f64 = 0.003;
/// Nothing is run side by side for less: ways that were predicted to gain 2 and 1 % took 14 and 22 % longer than one after the other on H200s
/// (`docs/experiments/033-scattered-rows.md`).
const LEAST_GAIN_OF_OVERLAP: f64 = 0.03;

/// Which pass of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertDirection {
    /// `y`.
    Forward,
    /// `dx` and what becomes of the gradients of the weights.
    Backward(WeightGradient),
}

impl ExpertDirection {
    /// What tuned passes are distinguished by.
    pub fn tuned_pass(self) -> TunedPass {
        match self {
            Self::Forward => TunedPass::Forward,
            Self::Backward(WeightGradient::Frozen | WeightGradient::Deferred) => TunedPass::InputGradient,
            Self::Backward(WeightGradient::Written) => TunedPass::WrittenGradient,
            Self::Backward(WeightGradient::Accumulated(dtype) | WeightGradient::Replaced(dtype)) => {
                TunedPass::AddedGradient(dtype)
            }
        }
    }
}

/// A way to run a pass, and what it is predicted to take.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertCandidate {
    /// The policy.
    pub policy: OverlapPolicy,
    /// A transport that runs it.
    pub transport: RankTransport,
    /// Groups of tokens.
    pub groups: ExpertGroups,
    /// Predicted seconds until the last rank is done.
    pub seconds: f64,
}

/// How a pass is run, with all that it was chosen from.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertChoice {
    /// All that can run, the simplest first; never empty.
    pub candidates: Vec<ExpertCandidate>,
    chosen: usize,
}

impl ExpertChoice {
    /// The candidate that is kept.
    pub fn chosen(&self) -> &ExpertCandidate {
        &self.candidates[self.chosen]
    }

    /// The fastest of a policy.
    pub fn under(&self, policy: &OverlapPolicy) -> Option<&ExpertCandidate> {
        let under = self.candidates.iter().filter(|one| one.policy == *policy);
        under.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }
}

impl LinearMachine {
    /// The policy and the groups of a pass of a layer of experts on these ranks: those that were tuned for as many tokens and rows, where they
    /// were, else those that are predicted to end first. Under a policy that is named, its groups.
    ///
    /// # Errors
    /// As [`expert_pass`].
    pub fn expert_way(
        &self,
        spec: ExpertSpec,
        routing: &Arc<Routing>,
        direction: ExpertDirection,
        named: Option<OverlapPolicy>,
    ) -> Result<(OverlapPolicy, ExpertGroups), SimulateError> {
        if let Some(policy) = named.filter(|policy| !policy.overlaps_by_groups()) {
            return Ok((policy, ExpertGroups::default()));
        }
        if let Some(tuned) = self.tuned_experts(&spec, routing, direction, named) {
            return Ok(tuned);
        }
        let choice = expert_pass(spec, routing, direction, &[self.transport], &self.topology, &self.cost)?;
        Ok(match named {
            None => (choice.chosen().policy, choice.chosen().groups),
            Some(policy) => (policy, choice.under(&policy).map_or(ExpertGroups::even(4), |best| best.groups)),
        })
    }

    fn tuned_experts(
        &self,
        spec: &ExpertSpec,
        routing: &Routing,
        direction: ExpertDirection,
        named: Option<OverlapPolicy>,
    ) -> Option<(OverlapPolicy, ExpertGroups)> {
        let tuned = self.tuned.as_ref()?;
        let shape = TunedExpertShape::of(spec, routing, direction.tuned_pass(), self.topology, &tuned.place)?;
        if let Some(policy) = named {
            return Some((policy, tuned.plans.experts.under(&shape, &policy.to_string())?.groups));
        }
        let runs = |policy: OverlapPolicy| {
            RankTransport::any_of(&[self.transport], &policy, Workload::Experts).is_ok()
        };
        let found = tuned.plans.experts.fastest(&shape, |plan| plan.policy.parse().is_ok_and(runs))?;
        Some((found.policy.parse().ok()?, found.groups))
    }
}

/// The Programs of a pass for these ranks.
pub fn expert_programs(
    plan: &ExpertPlan,
    ranks: &[usize],
    direction: ExpertDirection,
    policy: OverlapPolicy,
) -> Vec<Program> {
    let lower = |&rank: &usize| match direction {
        ExpertDirection::Forward => lower_expert_forward(plan, rank, policy),
        ExpertDirection::Backward(gradient) => lower_expert_backward(plan, rank, gradient, policy),
    };
    ranks.iter().map(lower).collect()
}

/// The policy and the groups of a pass that are predicted to end first, of those that one of `transports` runs as it is predicted. With
/// nothing side by side is always among them, so the choice never takes longer. A typical routing stands for those of all steps: results
/// have the same bits however passes are run, so `cost` may be what a machine was measured to do.
///
/// # Errors
/// As [`simulate`]: Programs of one plan fit each other, so none is known.
pub fn expert_pass(
    spec: ExpertSpec,
    routing: &Arc<Routing>,
    direction: ExpertDirection,
    transports: &[RankTransport],
    topology: &Topology,
    cost: &(impl OpCost + ?Sized),
) -> Result<ExpertChoice, SimulateError> {
    let busiest = [busiest(routing)];
    let seconds = |policy: OverlapPolicy, groups: ExpertGroups| {
        let plan = ExpertPlan::new(spec, routing.clone(), groups);
        let programs = expert_programs(&plan, &busiest, direction, policy);
        simulate(&programs, topology, cost).map(|timeline: Timeline| timeline.makespan())
    };
    let mut candidates: Vec<ExpertCandidate> = Vec::new();
    let mut add = |policy: OverlapPolicy, groups: ExpertGroups| -> Result<f64, SimulateError> {
        let Ok(transport) = RankTransport::any_of(transports, &policy, Workload::Experts) else {
            return Ok(f64::INFINITY);
        };
        if let Some(known) = candidates.iter().find(|one| (one.policy, one.groups) == (policy, groups)) {
            return Ok(known.seconds);
        }
        let seconds = seconds(policy, groups)?;
        candidates.push(ExpertCandidate { policy, transport, groups, seconds });
        Ok(seconds)
    };
    add(OverlapPolicy::SEQUENTIAL, ExpertGroups::default())?;
    if routing.ranks() > 1 {
        let rows = routing.rows().iter().sum::<usize>() / routing.experts();
        let most = (rows / LEAST_ROWS).max(1);
        let mut promising = Vec::new();
        for policy in policies(cost.rates()) {
            promising.push((add(policy, ExpertGroups::even(most.min(4)))?, policy));
        }
        promising.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (_, policy) in promising.into_iter().take(FINALISTS) {
            for count in COUNTS.into_iter().filter(|count| *count <= most) {
                for growth in GROWTHS.into_iter().filter(|growth| count > 1 || *growth == 100) {
                    add(policy, ExpertGroups { count, growth })?;
                }
            }
        }
    }
    let least = candidates.iter().map(|one| one.seconds).fold(f64::INFINITY, f64::min);
    let within = |one: &ExpertCandidate| {
        let overlaps = one.policy.overlaps();
        one.seconds <= least * (1.0 + if overlaps { LEAST_GAIN } else { LEAST_GAIN_OF_OVERLAP })
    };
    let chosen = candidates.iter().position(within).unwrap_or(0);
    Ok(ExpertChoice { candidates, chosen })
}

/// The rank with the most rows: it computes longest, and is sent most.
fn busiest(routing: &Routing) -> usize {
    let rows = routing.rows();
    let of_rank = |rank: &usize| {
        let experts = routing.experts_of(*rank);
        rows[experts.start..experts.end].iter().sum::<usize>()
    };
    (0..routing.ranks()).rev().max_by_key(of_rank).unwrap_or(0)
}

/// What overlaps, the simplest first.
fn policies(cost: &CostModel) -> Vec<OverlapPolicy> {
    let orders = || StartOrder::ALL.into_iter().map(OverlapPolicy::new).filter(OverlapPolicy::overlaps);
    // Where collectives take no workers, nothing waits for them to start.
    let mut policies: Vec<OverlapPolicy> = orders().filter(|policy| !policy.has_barriers()).collect();
    let Some(sharing) = cost.sharing else { return policies };
    for policy in orders() {
        let margins = [0, sharing.communication, 2 * sharing.communication];
        policies.extend(
            margins
                .into_iter()
                .filter(|margin| *margin < sharing.workers)
                .map(|margin| policy.leaving(margin)),
        );
    }
    for policy in Mover::named_for(Workload::Experts) {
        // Engines leave sums to kernels.
        policies.extend([policy, policy.leaving(sharing.communication)]);
    }
    let mut once: Vec<OverlapPolicy> = Vec::new();
    for policy in policies {
        if !once.contains(&policy) {
            once.push(policy);
        }
    }
    once
}
