//! What hosted work costs where it must not be underestimated: as much longer than predicted as it was ever measured.

use std::ops::Range;

use counterpoint_cost::CostModel;
use counterpoint_plan::{HostedWork, Plan};
use counterpoint_schedule::{OpCost, Program, ProgramOp};

use crate::remembered::bands_of;

/// By which factors a forward and a backward of hosted rows took longer than predicted on GPUs at most, where they were measured: 64 to 1,024
/// queries over 64k and 256k keys, 64:8 and 16:16 heads of 128, on two H200s (docs/experiments/079-hosted-rows.md). It is seen where rows are
/// few for the keys that they see; what hosts compute of more is attention as any other.
const SEEN: [f64; 2] = [1.05, 1.2];

/// Whether a row of hosted work sees more keys than there are rows, in the mean.
fn is_wide(work: &HostedWork) -> bool {
    (work.q_rows as u64).saturating_mul(work.q_rows as u64) < work.area
}

/// The costs of a model, with hosted work of a plan on GPUs as slow as such work was seen to be.
pub(crate) struct HostedCost<'a> {
    cost: &'a CostModel,
    plan: &'a Plan,
}

impl<'a> HostedCost<'a> {
    /// For Programs of `plan`.
    pub(crate) fn new(cost: &'a CostModel, plan: &'a Plan) -> Self {
        Self { cost, plan }
    }
}

impl OpCost for HostedCost<'_> {
    fn rates(&self) -> &CostModel {
        self.cost
    }

    fn part_seconds(
        &self,
        program: &Program,
        op: &ProgramOp,
        parts: Range<usize>,
        computed: f64,
    ) -> Option<f64> {
        let seconds = self.cost.part_seconds(program, op, parts, computed)?;
        let hosted = self.plan.ranks.get(program.rank).and_then(|rank| rank.hosted.as_ref());
        let (Some(hosted), Some((backward, bands)), Some(_)) = (hosted, bands_of(&op.op), self.cost.tiles)
        else {
            return Some(seconds);
        };
        // Programs share the bands of their plan.
        let is_hosted = std::ptr::eq(bands, &*hosted.bands) && !bands.is_empty() && is_wide(hosted);
        Some(if is_hosted { seconds * SEEN[usize::from(backward)] } else { seconds })
    }
}
