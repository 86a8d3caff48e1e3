//! Where a group's plans run, and what is chosen for them by prediction: who computes what, and how each pass overlaps.

use counterpoint_choose::{
    ChooseError, DeviceModel, DispatchAlgorithm, DispatchChoice, PassChoice, PlanConfig, PolicyChoice,
    attention_policies, plan_attention, plan_mask_on, plan_mask_within,
};
use counterpoint_cost::{CostModel, MachineProfile};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Fingerprint, Plan, Planning, Topology};
use counterpoint_schedule::{GradientReduction, PassPolicies, RankTransport};
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::{Raised, raise};

/// A machine as plans follow it: alike on all ranks of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Site {
    /// The GPU's name; of CPU ranks nothing, and plans are made as for an H200.
    pub(crate) machine: String,
    pub(crate) transport: RankTransport,
    pub(crate) topology: Topology,
    pub(crate) cost: CostModel,
}

impl Site {
    /// Of CPU ranks: plans as an H200 would have them, or the machine that was measured.
    pub(crate) fn cpu(topology: Topology, measured: Option<CostModel>) -> Self {
        let cost = measured.unwrap_or(PlanConfig::new(topology.world_size).cost);
        Self { machine: String::new(), transport: RankTransport::Cpu, topology, cost }
    }
}

/// Ranks on equally large nodes.
pub(crate) fn topology(size: usize, nodes: usize) -> Topology {
    Topology { world_size: size, ranks_per_node: size / nodes.max(1) }
}

/// The costs of a machine profile, as `counterpoint doctor --calibrate` writes it.
pub(crate) fn measured(py: Python<'_>, profile: Option<&str>) -> PyResult<Option<CostModel>> {
    let read = profile.map(MachineProfile::from_json).transpose();
    let read = read.map_err(|error| raise(py, "PlanError", &format!("profile: {error}"), &[]))?;
    Ok(read.map(|profile| profile.cost))
}

/// What was asked for where several will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Asked<T> {
    /// What is predicted to end first, where passes take long enough for the comparison to pay; else what is usual.
    Auto,
    /// What is predicted to end first, however long that takes to find.
    Predicted,
    Named(T),
}

impl<T> Asked<T> {
    /// `auto`, `predicted`, or what `read` makes of another name.
    pub(crate) fn named<E>(name: &str, read: impl FnOnce(&str) -> Result<T, E>) -> Result<Self, E> {
        match name {
            "auto" => Ok(Self::Auto),
            "predicted" => Ok(Self::Predicted),
            other => read(other).map(Self::Named),
        }
    }

    fn compares(&self, pays: bool) -> bool {
        matches!(self, Self::Predicted) || (pays && matches!(self, Self::Auto))
    }
}

/// Seconds of a rank's forward and backward, were its kernels at their best, from which on comparing pays by default. It takes 2 to 40 ms
/// of one core for a mask, once for all layers, and gains some percent of attention in the mean.
const WORTH_SECONDS: f64 = 0.010;

/// A problem that is to be planned.
pub(crate) struct Problem<'a> {
    pub(crate) mask: &'a Mask,
    pub(crate) spec: &'a AttentionSpec,
    /// Whose dispatch is the usual one.
    pub(crate) config: PlanConfig,
    pub(crate) backward: GradientReduction,
}

/// What was chosen, and from what.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Choices {
    pub(crate) dispatch: DispatchAlgorithm,
    /// Seconds of forward and backward by dispatch, `None` where it was left out early; empty where none were compared.
    pub(crate) dispatches: Vec<(DispatchAlgorithm, Option<f64>)>,
    pub(crate) policies: PassPolicies,
    /// Seconds by policy, of each pass; empty where none were compared.
    pub(crate) forward: Vec<(String, f64)>,
    pub(crate) backward: Vec<(String, f64)>,
    /// Why something was not compared that was left open.
    pub(crate) reason: Option<String>,
}

impl Problem<'_> {
    /// What a group distinguishes its plans by: the problem, the plan `on` whose dispatch is kept, and what was `asked` for.
    pub(crate) fn fingerprint(
        &self,
        on: Option<(&Plan, DispatchAlgorithm)>,
        asked: &impl Serialize,
    ) -> Fingerprint {
        let Self { mask, spec, config, .. } = self;
        match on {
            Some((on, dispatch)) => {
                Fingerprint::of_mask_on(on, mask, spec, &config.on_a_dispatch()).and(&(asked, dispatch))
            }
            None => Fingerprint::of(mask, spec, config).and(asked),
        }
    }

    /// The plan, and what was chosen for it, made as `planning` says. Pure: every rank finds the same.
    pub(crate) fn solve(
        mut self,
        site: &Site,
        on: Option<(&Plan, DispatchAlgorithm)>,
        dispatch: Asked<DispatchAlgorithm>,
        overlap: Asked<PassPolicies>,
        planning: &Planning<'_>,
    ) -> Result<(Plan, Choices), ChooseError> {
        let (pays, reason) = self.pays(site);
        let mut choice = None;
        if let Asked::Named(named) = dispatch {
            self.config.dispatch = named;
        }
        let Self { mask, spec, config, backward } = self;
        let plan = match on {
            Some((on, _)) => plan_mask_on(on, mask, spec, &config, planning)?,
            None if dispatch.compares(pays) => {
                let model = DeviceModel::for_choices(&site.machine, &config.cost);
                let (plan, chosen) = plan_attention(mask, spec, &config, model, u64::MAX, planning)?;
                choice = Some(chosen);
                plan
            }
            None => plan_mask_within(mask, spec, &config, u64::MAX, planning)?,
        };
        let plan = plan.over_nodes(&site.topology);
        let policies = match overlap {
            _ if overlap.compares(pays) => Some(site.policies(&plan, spec, backward, planning)?),
            _ => None,
        };
        let is_open = on.is_none() && dispatch == Asked::Auto || overlap == Asked::Auto;
        let named = if let Asked::Named(policies) = overlap { policies } else { PassPolicies::default() };
        let usual = on.map_or(config.dispatch, |(_, dispatch)| dispatch);
        let reason = reason.filter(|_| is_open);
        Ok((plan, Choices::new(usual, choice, (named, policies), reason)))
    }

    /// Whether comparing pays, or why it does not.
    fn pays(&self, site: &Site) -> (bool, Option<String>) {
        let ranks = site.topology.world_size;
        if ranks < 2 {
            return (false, Some("one rank has nothing to choose".to_owned()));
        }
        let cost = &DeviceModel::for_choices(&site.machine, &self.config.cost).cost;
        let area = self.mask.area();
        let seconds = (self.spec.flops_forward(area) / cost.forward_flops_per_second
            + self.spec.flops_backward(area) / cost.backward_flops_per_second)
            / ranks as f64;
        let worth = WORTH_SECONDS * 1e3;
        let reason = || {
            format!(
                "forward and backward are {:.3} ms of a rank's kernels, and comparing pays from {worth} ms on",
                seconds * 1e3
            )
        };
        let pays = seconds >= WORTH_SECONDS;
        (pays, (!pays).then(reason))
    }
}

impl Site {
    fn policies(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        backward: GradientReduction,
        planning: &Planning<'_>,
    ) -> Result<PolicyChoice, ChooseError> {
        let mut cost = self.cost;
        if self.transport == RankTransport::Cpu {
            // Threads that move rows take no workers from those that compute.
            cost.sharing = None;
        }
        attention_policies(plan, spec, Some(backward), &[self.transport], &self.topology, &cost, planning)
    }
}

impl Choices {
    fn new(
        usual: DispatchAlgorithm,
        dispatch: Option<DispatchChoice>,
        (named, policies): (PassPolicies, Option<PolicyChoice>),
        reason: Option<String>,
    ) -> Self {
        let of_pass = |pass: &PassChoice| {
            pass.candidates.iter().map(|one| (one.policy.to_string(), one.seconds)).collect::<Vec<_>>()
        };
        let candidates = |choice: &DispatchChoice| {
            choice.candidates.iter().map(|one| (one.algorithm, one.seconds)).collect::<Vec<_>>()
        };
        Self {
            dispatch: dispatch.as_ref().map_or(usual, |choice| choice.chosen),
            dispatches: dispatch.as_ref().map(candidates).unwrap_or_default(),
            policies: policies.as_ref().map_or(named, PolicyChoice::policies),
            forward: policies.as_ref().map(|choice| of_pass(&choice.forward)).unwrap_or_default(),
            backward: policies.and_then(|choice| choice.backward.as_ref().map(of_pass)).unwrap_or_default(),
            reason,
        }
    }
}

impl Choices {
    /// With the policies as the text that names them.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let Self { dispatch, dispatches, policies, forward, backward, reason } = self;
        let overlap = policies.to_string();
        serde_json::json!({
            "dispatch": dispatch, "overlap": overlap, "dispatches": dispatches, "forward": forward, "backward": backward,
            "reason": reason,
        })
    }
}

impl Raised for ChooseError {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}
