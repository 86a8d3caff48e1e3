//! Seconds of attention that are worked out once a plan: policies change when operations start, not what they compute.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use counterpoint_cost::CostModel;
use counterpoint_mask::Band;
use counterpoint_plan::Plan;
use counterpoint_schedule::{Op, OpCost, Program, ProgramOp};

/// Which part of which operation of which rank after how many seconds (their bits).
type Key = (bool, usize, usize, usize, u64);

/// What was worked out, of the Programs of one plan.
#[derive(Default)]
pub(crate) struct KnownSeconds(BTreeMap<Key, Option<f64>>);

/// The costs of `cost`, with what was worked out before for the same plan. Programs differ in nothing but their policies.
pub(crate) struct RememberedCost<'a, C: OpCost + ?Sized> {
    cost: &'a C,
    known: Mutex<KnownSeconds>,
}

impl<'a, C: OpCost + ?Sized> RememberedCost<'a, C> {
    /// Of Programs of `plan`, which keeps alive what distinguishes their operations. `known` are seconds of the same plan and costs.
    pub(crate) fn new(cost: &'a C, _plan: &'a Plan, known: KnownSeconds) -> Self {
        Self { cost, known: Mutex::new(known) }
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

    fn part_seconds(&self, program: &Program, op: &ProgramOp, part: usize, computed: f64) -> Option<f64> {
        let work_out = || self.cost.part_seconds(program, op, part, computed);
        let Some((backward, bands)) = bands_of(&op.op) else { return work_out() };
        let key = (backward, program.rank, bands.as_ptr() as usize, part, computed.to_bits());
        if let Some(&seconds) = self.known().0.get(&key) {
            return seconds;
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
