//! How a layer's passes overlap.

use counterpoint_plan::{
    CostModel, LinearDirection, LinearPass, LinearPlan, LinearSpec, PassOverlap, PlanError, WaveGroups,
};
use counterpoint_schedule::OverlapPolicy;

use super::layer::LayerGradient;

/// How the passes of a layer share a machine. Results have the same bits however they do.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerOverlap {
    /// Each pass in the way that is predicted to end soonest by these costs, of those that the machine has.
    Predicted(CostModel),
    /// Both by this policy, in these groups; automatic ones by these costs, and all in one where groups have nothing to hide.
    Policy(OverlapPolicy, WaveGroups, CostModel),
}

impl Default for LayerOverlap {
    /// By the costs of a machine that nobody has measured.
    fn default() -> Self {
        Self::Predicted(CostModel::H200)
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
    /// The passes of a layer over `tp_size` ranks of a machine that has these ways to overlap
    /// ([`Machine::pass_overlaps`](crate::Machine::pass_overlaps)).
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub fn passes(
        &self,
        ways: &[PassOverlap],
        spec: LinearSpec,
        tp_size: usize,
        gradient: LayerGradient,
    ) -> Result<PlannedPasses, PlanError> {
        let cost = match self {
            Self::Policy(policy, groups, cost) => {
                let groups = match groups {
                    WaveGroups::Auto if !policy.overlaps_by_groups() => WaveGroups::Fixed(1),
                    groups => groups.clone(),
                };
                let plan = LinearPlan::new(spec, tp_size, groups, cost)?;
                let pass = PlannedPass { plan, policy: *policy };
                return Ok(PlannedPasses { forward: pass.clone(), backward: pass });
            }
            Self::Predicted(cost) => cost,
        };
        let pass = |direction: LinearDirection| {
            // Where workers are threads, what overlaps takes nothing from each other, and groups do.
            if ways.is_empty() {
                let plan = LinearPlan::new(spec, tp_size, WaveGroups::Auto, cost)?;
                return Ok(PlannedPass { plan, policy: OverlapPolicy::default() });
            }
            let pass = LinearPass { spec, tp_size, direction };
            let way = pass.fastest(ways, cost);
            let groups = if way == PassOverlap::Beside { pass.groups_beside(cost) } else { 1 };
            let plan = LinearPlan::new(spec, tp_size, WaveGroups::Fixed(groups), cost)?;
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
    use counterpoint_plan::{Activations, DType, LinearKind};
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
        let groups = |policy, groups| {
            let overlap = LayerOverlap::Policy(policy, groups, cost);
            let passes = overlap.passes(&[], spec, 2, LayerGradient::Written).unwrap();
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
