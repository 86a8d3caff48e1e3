//! In which way and in which groups a pass of a linear layer is predicted to end first: what its parts let expect, unless the simulator
//! says that another way or other groups end sooner.

use counterpoint_cost::CostModel;
use counterpoint_plan::{LinearPlan, PlanError, WaveGroups};
use counterpoint_schedule::{OverlapPolicy, PassOverlap};

use super::group_search::PassClock;
use super::groups::MOST_GROUPS;
use super::pass::{Candidate, LinearPass, WORKERS_COST};
use super::simulated_clock::SimulatedClock;

/// Equal groups that are tried besides those that follow from what the parts of a pass take: they may lie better on the tiles of kernels.
const EQUAL_GROUPS: [usize; 6] = [1, 2, 3, 4, 8, MOST_GROUPS];

/// What is expected gives way to what the simulator says takes less than this part of it.
const LEAST_GAIN: f64 = 1.0 / 1.01;

/// A way to run a pass in groups, and what the simulator says of it.
struct Simulated {
    overlap: PassOverlap,
    plan: LinearPlan,
    seconds: f64,
}

impl LinearPass {
    /// The way that is predicted to end first, of those that a machine has, and the layer in the groups of that way.
    ///
    /// Between a fused kernel and copy engines decides what was measured of both; the simulator decides about the rest. Kernels that take
    /// multiprocessors from products count for a tenth more where one of these is to be had.
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub fn fastest(
        &self,
        ways: &[PassOverlap],
        cost: &CostModel,
    ) -> Result<(PassOverlap, LinearPlan), PlanError> {
        let whole = LinearPlan::new(self.spec, self.topology.world_size, WaveGroups::Fixed(1))?;
        let candidates = self.candidates(ways, &whole, cost);
        let Some(expected) = Candidate::soonest(candidates.iter()) else {
            return Ok((PassOverlap::SEQUENTIAL, whole));
        };
        let sparing = candidates.iter().filter(|one| one.overlap.spares_workers());
        let sparing = Candidate::soonest(sparing).map(|one| one.overlap);
        let simulated = |overlap: PassOverlap, groups: WaveGroups| {
            let plan = LinearPlan::new(self.spec, self.topology.world_size, groups)?;
            let rate = if sparing.is_some() && overlap.takes_workers() { WORKERS_COST } else { 1.0 };
            let seconds = rate * self.simulated(overlap, &plan, cost);
            Ok::<_, PlanError>(Simulated { overlap, plan, seconds })
        };
        let expected = simulated(expected.overlap, expected.groups.clone())?;
        let mut least: Option<Simulated> = None;
        for &Candidate { overlap: way, groups: ref own, .. } in &candidates {
            if way.spares_workers() && Some(way) != sparing {
                continue;
            }
            let by_groups = OverlapPolicy::from(way).overlaps_by_groups();
            let equal = EQUAL_GROUPS.into_iter().take_while(|groups| by_groups || *groups == 1);
            for groups in [own.clone()].into_iter().chain(equal.map(WaveGroups::Fixed)) {
                let one = simulated(way, groups)?;
                if least.as_ref().is_none_or(|least| one.seconds < least.seconds) {
                    least = Some(one);
                }
            }
        }
        let sooner = least.filter(|least| least.seconds < LEAST_GAIN * expected.seconds);
        let Simulated { overlap, plan, .. } = sooner.unwrap_or(expected);
        Ok((overlap, plan))
    }

    /// What the simulator says that it takes so; for ever where it cannot be simulated.
    fn simulated(&self, overlap: PassOverlap, plan: &LinearPlan, cost: &CostModel) -> f64 {
        let Self { spec, topology, direction } = *self;
        let mut clock = SimulatedClock { spec, direction, topology, cost, policy: overlap.into() };
        clock.pass(plan).unwrap_or(f64::INFINITY)
    }
}
