//! The one source of seconds: what an operation's computation takes, what links carry, what sharing costs.

use std::ops::Range;

use counterpoint_cost::{CostModel, MachineProfile};

use crate::op_seconds::{compute_seconds, part_seconds};
use crate::{Program, ProgramOp};

/// What operations cost on a device. Everything follows from [`OpCost::rates`]; an implementation may know better, or remember.
pub trait OpCost {
    /// Rates, links and what sharing costs.
    fn rates(&self) -> &CostModel;

    /// Seconds of a whole computation, of a rank that has computed for so many before.
    fn compute_seconds(&self, program: &Program, op: &ProgramOp, computed_seconds: f64) -> f64 {
        compute_seconds(program, op, computed_seconds, self.rates())
    }

    /// Seconds of the last of these parts of a computation, in the order in which they end, which follow each other without a pause; `None`
    /// where it has fewer parts.
    fn part_seconds(
        &self,
        program: &Program,
        op: &ProgramOp,
        parts: Range<usize>,
        computed_seconds: f64,
    ) -> Option<f64> {
        part_seconds(program, op, parts, computed_seconds, self.rates())
    }
}

impl OpCost for CostModel {
    fn rates(&self) -> &CostModel {
        self
    }
}

impl OpCost for MachineProfile {
    fn rates(&self) -> &CostModel {
        &self.cost
    }
}
