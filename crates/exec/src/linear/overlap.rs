//! How a layer's passes overlap.

use counterpoint_plan::{
    CostModel, LinearDirection, LinearMachine, LinearPlan, LinearSpec, PlanError, WaveGroups,
};
use counterpoint_schedule::OverlapPolicy;

use super::layer::LayerGradient;

/// How the passes of a layer share a machine. Results have the same bits however they do.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerOverlap {
    /// Each pass in the way that is predicted to end first, of those that the machine has: by these costs, or by those that the machine
    /// itself says.
    Predicted(Option<CostModel>),
    /// Both by this policy, in these groups; automatic ones by these costs, and all in one where groups have nothing to hide.
    Policy(OverlapPolicy, WaveGroups, CostModel),
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
        let cost = match self {
            Self::Policy(policy, groups, cost) => {
                let groups = match groups {
                    WaveGroups::Auto if !policy.overlaps_by_groups() => WaveGroups::Fixed(1),
                    groups => groups.clone(),
                };
                let plan = LinearPlan::new(spec, machine.topology.world_size, groups, cost)?;
                let pass = PlannedPass { plan, policy: *policy };
                return Ok(PlannedPasses { forward: pass.clone(), backward: pass });
            }
            Self::Predicted(cost) => cost.as_ref().unwrap_or(&machine.cost),
        };
        let pass = |direction: LinearDirection| {
            let (way, plan) = machine.fastest(spec, direction, cost)?;
            Ok(PlannedPass { plan, policy: way.into() })
        };
        let weight_gradient = !matches!(gradient, LayerGradient::Frozen | LayerGradient::Deferred { .. });
        Ok(PlannedPasses {
            forward: pass(LinearDirection::Forward)?,
            backward: pass(LinearDirection::Backward { weight_gradient })?,
        })
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::{Activations, DType, LinearKind, Topology};
    use counterpoint_schedule::{Mover, StartOrder};

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
        let machine = LinearMachine { overlaps: Vec::new(), topology, cost };
        let groups = |policy, groups| {
            let overlap = LayerOverlap::Policy(policy, groups, cost);
            let passes = overlap.passes(&machine, spec, LayerGradient::Written).unwrap();
            passes.backward.plan.groups()
        };
        let fused = OverlapPolicy { mover: Mover::Fused, ..OverlapPolicy::default() };
        let sequential = OverlapPolicy::new(StartOrder::Sequential);
        assert!(groups(OverlapPolicy::default(), WaveGroups::Auto) > 1);
        for policy in [fused, sequential] {
            assert_eq!(groups(policy, WaveGroups::Auto), 1);
            assert_eq!(groups(policy, WaveGroups::Fixed(3)), 3);
        }
    }
}
