//! How a layer's passes overlap.

use counterpoint_choose::{LayerGroups, LinearMachine, TunedPass, TunedShape};
use counterpoint_cost::CostModel;
use counterpoint_plan::{LinearPlan, LinearSpec, PlanError, WaveGroups};
use counterpoint_schedule::{OverlapPolicy, PassOverlap};

use super::layer::LayerGradient;

/// How the passes of a layer share a machine. Results have the same bits however they do.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerOverlap {
    /// Each pass as it was tuned on this machine ([`Group::with_tuned`](crate::Group::with_tuned)); where it was not, in the way that is
    /// predicted to end first, of those that the machine has: by these costs, or by those that the machine itself says.
    Predicted(Option<CostModel>),
    /// Both by this policy, in these groups. Automatic ones are those that were tuned for it, or follow from these costs, and are one
    /// where groups have nothing to hide.
    Policy(OverlapPolicy, LayerGroups, CostModel),
}

impl Default for LayerOverlap {
    /// By the machine's own costs.
    fn default() -> Self {
        Self::Predicted(None)
    }
}

/// A pass of a layer as it is run.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedPass {
    /// The layer in the pass's groups.
    pub plan: LinearPlan,
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
}

/// The passes of a layer as they are run.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedPasses {
    /// `y`.
    pub forward: PlannedPass,
    /// `dx` and the gradient of the weight.
    pub backward: PlannedPass,
}

impl LayerOverlap {
    /// The passes of a layer on the ranks of a machine ([`Machine::linear`](crate::Machine::linear)).
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub fn passes(
        &self,
        machine: &LinearMachine,
        spec: LinearSpec,
        gradient: LayerGradient,
    ) -> Result<PlannedPasses, PlanError> {
        let forward = TunedPass::Forward;
        let backward = gradient.tuned_pass();
        match self {
            Self::Policy(policy, groups, cost) => {
                let pass = |pass: TunedPass| {
                    let groups = match groups {
                        LayerGroups::Auto if !policy.overlaps_by_groups() => WaveGroups::Fixed(1).into(),
                        LayerGroups::Auto => tuned_groups(machine, &spec, pass, policy),
                        groups => groups.clone(),
                    };
                    let plan = groups.plan(spec, machine.topology.world_size, cost)?;
                    Ok(PlannedPass { plan, policy: *policy })
                };
                Ok(PlannedPasses { forward: pass(forward)?, backward: pass(backward)? })
            }
            Self::Predicted(cost) => {
                let cost = cost.as_ref().unwrap_or(&machine.cost);
                let pass = |pass: TunedPass| match tuned_pass(machine, &spec, pass) {
                    Some(tuned) => tuned,
                    None => {
                        let (way, plan) = machine.fastest(spec, pass.direction(), cost)?;
                        Ok(PlannedPass { plan, policy: way.into() })
                    }
                };
                Ok(PlannedPasses { forward: pass(forward)?, backward: pass(backward)? })
            }
        }
    }
}

/// The pass as it was tuned; `None` where it was not.
fn tuned_pass(
    machine: &LinearMachine,
    spec: &LinearSpec,
    pass: TunedPass,
) -> Option<Result<PlannedPass, PlanError>> {
    let tuned = machine.tuned.as_ref()?;
    let shape = TunedShape::of(spec, pass, machine.topology, &tuned.place)?;
    let runs = |policy: &str| policy.parse().is_ok_and(|policy| has_kernels(machine, &policy));
    let found = tuned.plans.layers.fastest(&shape, runs)?;
    let policy = found.policy.parse().ok()?;
    let plan = LinearPlan::new(*spec, machine.topology.world_size, found.wave_groups());
    Some(plan.map(|plan| PlannedPass { plan, policy }))
}

/// Whether a pass that takes this machine can be fused as the policy says: layers that share an input cannot.
fn has_kernels(machine: &LinearMachine, policy: &OverlapPolicy) -> bool {
    !policy.is_fused() || machine.overlaps.iter().any(PassOverlap::is_fused)
}

/// The groups that were tuned for a pass under a policy, or automatic ones.
fn tuned_groups(
    machine: &LinearMachine,
    spec: &LinearSpec,
    pass: TunedPass,
    policy: &OverlapPolicy,
) -> LayerGroups {
    let found = machine.tuned.as_ref().and_then(|tuned| {
        let shape = TunedShape::of(spec, pass, machine.topology, &tuned.place)?;
        tuned.plans.layers.under(&shape, &policy.to_string())
    });
    found.map_or(LayerGroups::Auto, |plan| plan.wave_groups().into())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use counterpoint_choose::{GroupSearch, TunedGroups, TunedHere, TunedPlace, TunedPlans};
    use counterpoint_plan::{Activations, DType, GemmCollective, LinearKind, Topology};
    use counterpoint_schedule::RankTransport;

    use super::*;

    #[test]
    fn groups_are_for_policies_that_overlap_by_them() {
        let (kind, activations) = (LinearKind::Column, Activations::Replicated);
        let (tokens, in_features, out_features) = (8192, 8192, 14336);
        let spec = LinearSpec {
            kind,
            activations,
            tokens,
            in_features,
            out_features,
            has_bias: false,
            dtype: DType::Bf16,
        };
        let mut cost = CostModel::H200;
        cost.link.bytes_per_second /= 4.0;
        let topology = Topology::flat(2);
        let machine = LinearMachine::new(RankTransport::Nvlink, Vec::new(), topology, cost);
        let groups = |policy, groups: LayerGroups| {
            let overlap = LayerOverlap::Policy(policy, groups, cost);
            let passes = overlap.passes(&machine, spec, LayerGradient::Written).unwrap();
            passes.backward.plan.groups()
        };
        let fused = OverlapPolicy::FUSED;
        let sequential = OverlapPolicy::SEQUENTIAL;
        assert!(groups(OverlapPolicy::default(), LayerGroups::Auto) > 1);
        for policy in [fused, sequential] {
            assert_eq!(groups(policy, LayerGroups::Auto), 1);
            assert_eq!(groups(policy, WaveGroups::Fixed(3).into()), 3);
        }
    }

    /// Layers that share an input have no fused product, and the key of tuned plans does not distinguish them from others.
    #[test]
    fn tuned_plans_that_a_machine_has_no_kernels_for_are_passed_over() {
        let collective = GemmCollective::ReduceScatter;
        let spec = collective.layer([64, 32, 16].into(), DType::F32);
        let (topology, cost) = (Topology::flat(2), CostModel::H200);
        let place = TunedPlace { device: "X".to_owned(), transport: "nvlink".to_owned() };
        let shape = TunedShape::of(&spec, TunedPass::Forward, topology, &place).unwrap();
        let tuned = |policy: &str, groups: &[usize], seconds| TunedGroups {
            shape: shape.clone(),
            policy: policy.to_owned(),
            groups: groups.to_vec(),
            seconds,
            sequential_seconds: 1.0,
            search: GroupSearch::Exhaustive,
        };
        let mut plans = TunedPlans::default();
        plans.layers.insert(tuned("fused", &[32], 0.1));
        plans.layers.insert(tuned("concurrent", &[12, 20], 0.2));
        let ran = |overlaps| {
            let tuned = Some(Arc::new(TunedHere { place: place.clone(), plans: plans.clone() }));
            let machine = LinearMachine { transport: RankTransport::Nvlink, overlaps, topology, cost, tuned };
            let passes = LayerOverlap::default().passes(&machine, spec, LayerGradient::Written).unwrap();
            (passes.forward.policy.to_string(), passes.forward.plan.group_sizes().to_vec())
        };
        let fused = "concurrent+fused".to_owned();
        let ways = RankTransport::Nvlink.pass_overlaps(true, 16);
        let fused_way = ways.into_iter().find(PassOverlap::is_fused).unwrap();
        assert_eq!(ran(vec![PassOverlap::SEQUENTIAL, fused_way]), (fused, vec![32]));
        assert_eq!(ran(vec![PassOverlap::SEQUENTIAL]), ("concurrent".to_owned(), vec![12, 20]));
    }
}
