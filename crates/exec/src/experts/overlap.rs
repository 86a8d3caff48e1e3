//! How the passes of a layer of experts overlap.

use std::sync::Arc;

use counterpoint_choose::{ExpertDirection, LinearMachine};
use counterpoint_plan::{ExpertGroups, ExpertSpec, Routing};
use counterpoint_schedule::{OverlapPolicy, WeightGradient};

use crate::ExecError;

/// How a pass of a layer of experts is run. Results have the same bits however it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertPass {
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
    /// Groups of tokens.
    pub groups: ExpertGroups,
}

/// How the passes of a layer of experts are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertPasses {
    /// `y`.
    pub forward: ExpertPass,
    /// `dx` and the gradients of the weights.
    pub backward: ExpertPass,
}

/// How the passes of a layer of experts share a machine. What is left open is chosen by the first routing that the layer is given, which stands
/// for those that follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertOverlap {
    /// Each pass as it was tuned on this machine for as many tokens and rows ([`Group::with_tuned`](crate::Group::with_tuned)); where it was
    /// not, in the way that is predicted to end first, by the machine's own costs.
    #[default]
    Predicted,
    /// Both by this policy, in the groups that were tuned for it or are predicted to end first.
    Policy(OverlapPolicy),
    /// So.
    Passes(ExpertPasses),
}

impl ExpertOverlap {
    /// Workers that policies which are named leave free.
    pub fn sm_margin(&self) -> usize {
        match self {
            Self::Predicted => 0,
            Self::Policy(policy) => policy.sm_margin(),
            Self::Passes(ExpertPasses { forward, backward }) => {
                forward.policy.sm_margin().max(backward.policy.sm_margin())
            }
        }
    }

    /// The passes of a layer on the ranks of a machine ([`Machine::linear`](crate::Machine::linear)) under such a routing.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] where a pass cannot be predicted: none is known.
    pub fn passes(
        &self,
        machine: &LinearMachine,
        spec: ExpertSpec,
        routing: &Arc<Routing>,
        gradient: WeightGradient,
    ) -> Result<ExpertPasses, ExecError> {
        let named = match *self {
            Self::Passes(passes) => return Ok(passes),
            Self::Policy(policy) => Some(policy),
            Self::Predicted => None,
        };
        let pass = |direction| match machine.expert_way(spec, routing, direction, named) {
            Ok((policy, groups)) => Ok(ExpertPass { policy, groups }),
            Err(error) => Err(ExecError::tensor("layer", error)),
        };
        let backward = ExpertDirection::Backward(gradient);
        Ok(ExpertPasses { forward: pass(ExpertDirection::Forward)?, backward: pass(backward)? })
    }
}
