use counterpoint_plan::CostModel;

use crate::{Program, Timeline};

/// placeholder
pub fn simulate(_programs: &[Program], _cost: &CostModel) -> Timeline {
    unreachable!()
}
