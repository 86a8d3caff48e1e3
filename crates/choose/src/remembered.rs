//! Seconds of attention that are worked out once a plan: policies change when operations start, not what they compute.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use counterpoint_cost::CostModel;
use counterpoint_mask::Band;
use counterpoint_plan::{Plan, Planning};
use counterpoint_schedule::{Op, OpCost, Program, ProgramOp};

/// Which part of which operation of which rank after how many seconds (their bits).
type Key = (bool, usize, usize, usize, u64);

/// What was worked out, of the Programs of one plan.
#[derive(Default)]
pub(crate) struct KnownSeconds(BTreeMap<Key, Option<f64>>);

/// The costs of `cost`, with what was worked out before for the same plan. Programs differ in nothing but their policies. Once planning is
/// called off nothing takes any time, so that a simulation ends; its result is dropped.
pub(crate) struct RememberedCost<'a, C: OpCost + ?Sized> {
    cost: &'a C,
    known: Mutex<KnownSeconds>,
    planning: Planning<'a>,
}

impl<'a, C: OpCost + ?Sized> RememberedCost<'a, C> {
    /// Of Programs of `plan`, which keeps alive what distinguishes their operations. `known` are seconds of the same plan and costs.
    pub(crate) fn new(cost: &'a C, _plan: &'a Plan, known: KnownSeconds, planning: &Planning<'a>) -> Self {
        Self { cost, known: Mutex::new(known), planning: *planning }
    }

    fn known(&self) -> MutexGuard<'_, KnownSeconds> {
        // Entries are whole or not there.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn into_known(self) -> KnownSeconds {
        self.known.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: OpCost + ?Sized> OpCost for RememberedCost<'_, C> {
    fn rates(&self) -> &CostModel {
        self.cost.rates()
    }

    fn part_seconds(
        &self,
        program: &Program,
        op: &ProgramOp,
        parts: Range<usize>,
        computed: f64,
    ) -> Option<f64> {
        let part = parts.end;
        let work_out = || self.cost.part_seconds(program, op, parts, computed);
        let Some((backward, bands)) = bands_of(&op.op) else { return work_out() };
        let key = (backward, program.rank, bands.as_ptr() as usize, part, computed.to_bits());
        if let Some(&seconds) = self.known().0.get(&key) {
            return seconds;
        }
        if self.planning.is_cancelled() {
            return Some(0.0);
        }
        let seconds = work_out();
        self.known().0.insert(key, seconds);
        seconds
    }
}

/// The work of an attention, which a plan has once for each stage of a pass; whether it is of a backward.
pub(crate) fn bands_of(op: &Op) -> Option<(bool, &[Band])> {
    match op.computation() {
        Op::AttentionForward(forward) => Some((false, &forward.bands)),
        Op::AttentionBackward(backward) => Some((true, &backward.bands)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Mask;
    use counterpoint_plan::{AttentionSpec, CancellationToken, DType};
    use counterpoint_schedule::{KeyBlocks, OverlapPolicy, lower_attention_forward};

    use super::*;
    use crate::{PlanConfig, plan_mask};

    /// What was worked out before stays; nothing else is worked out once planning is called off, or remembered.
    #[test]
    fn nothing_is_worked_out_once_planning_is_called_off() {
        let (mask, spec) = (Mask::causal(4096).unwrap(), AttentionSpec::new(8, 2, 128, DType::Bf16));
        let plan = plan_mask(&mask, &spec, &PlanConfig::new(2)).unwrap();
        let programs = [0, 1].map(|rank| {
            lower_attention_forward(&plan, rank, &spec, OverlapPolicy::default(), KeyBlocks::Unaligned)
        });
        let token = CancellationToken::new();
        let planning = Planning::ALONE.until(&token);
        let cost = RememberedCost::new(&CostModel::H200, &plan, KnownSeconds::default(), &planning);
        let seconds = |program: &Program| {
            let op = program.ops.iter().find(|op| bands_of(&op.op).is_some()).unwrap();
            cost.part_seconds(program, op, 0..1, 0.0)
        };
        let before = seconds(&programs[0]);
        assert!(before.is_some_and(|seconds| seconds > 0.0));
        token.cancel();
        assert_eq!((seconds(&programs[0]), seconds(&programs[1])), (before, Some(0.0)));
        assert_eq!(cost.into_known().0.len(), 1);
    }
}
