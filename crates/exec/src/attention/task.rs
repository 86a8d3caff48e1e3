//! What is asked of attention: a plan and how it is run, from which each rank's Programs and their tables follow.

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{PassPolicies, Program};

use super::programs::{backward_program, forward_program, plan_identity};
use super::step_tables::StepTables;
use crate::{DescribedDevice, ExecError, Pass, PlanIdentity, TablesFault};

/// Attention of a plan that is to be made ready: the same on all ranks. A value, which knows no device.
#[derive(Clone, Debug)]
pub struct AttentionTask<'a> {
    plan: &'a Plan,
    spec: &'a AttentionSpec,
    pass: Pass,
    policy: PassPolicies,
    deterministic: bool,
    identity: PlanIdentity,
}

impl<'a> AttentionTask<'a> {
    /// Of a plan, with one policy or one for each pass.
    pub fn new(
        plan: &'a Plan,
        spec: &'a AttentionSpec,
        pass: Pass,
        policy: impl Into<PassPolicies>,
        deterministic: bool,
    ) -> Self {
        let policy = policy.into();
        let identity = plan_identity(plan, spec, policy, deterministic);
        Self { plan, spec, pass, policy, deterministic, identity }
    }

    /// The step tables of a rank on a device like this one: pure, in any process. A group whose rank is on such a device takes them
    /// ([`Group::attention_with`](crate::Group::attention_with)).
    ///
    /// # Errors
    /// When the plan has no such rank; as [`DescribedDevice::tables`].
    pub fn tables<D: DescribedDevice>(&self, device: &D, rank: usize) -> Result<StepTables<D>, ExecError> {
        if rank >= self.ranks() {
            return Err(ExecError::Tables { rank, reason: TablesFault::NoRank { ranks: self.ranks() } });
        }
        StepTables::of_programs(device, &self.programs(rank), &self.identity)
    }

    /// Ranks of the plan.
    pub(super) fn ranks(&self) -> usize {
        self.plan.ranks.len()
    }

    /// What all ranks must have alike.
    pub(super) fn identity(&self) -> &PlanIdentity {
        &self.identity
    }

    /// A rank's forward, and its backward where there is one.
    pub(super) fn programs(&self, rank: usize) -> Vec<Program> {
        let Self { plan, spec, pass, policy, deterministic, .. } = *self;
        let mut programs = vec![forward_program(plan, rank, spec, policy.forward, deterministic)];
        if pass == Pass::ForwardBackward {
            programs.push(backward_program(plan, rank, spec, policy.backward, deterministic));
        }
        programs
    }
}
