//! In which way and in which groups a pass of a linear layer is predicted to end first: what its parts let expect, unless the simulator
//! says that another way or other groups, of tokens or of columns, end sooner.

use counterpoint_cost::CostModel;
use counterpoint_plan::{GROUP_TILE_ROWS, GemmCollective, LinearPlan, PlanError, WaveGroups};
use counterpoint_schedule::{OverlapPolicy, PassOverlap};

use super::group_search::PassClock;
use super::groups::MOST_GROUPS;
use super::pass::{Candidate, LinearPass, WORKERS_COST};
use super::simulated_clock::SimulatedClock;

/// Equal groups that are tried besides those that follow from what the parts of a pass take: they may lie better on the tiles of kernels.
const EQUAL_GROUPS: [usize; 6] = [1, 2, 3, 4, 8, MOST_GROUPS];

/// What is expected gives way to what the simulator says takes less than this part of it.
const LEAST_GAIN: f64 = 1.0 / 1.01;

/// Groups of columns that are tried.
pub(super) const COLUMN_GROUPS: [usize; 3] = [2, 4, 8];

/// Passes of so many rows of each rank travel in groups of tokens that are whole tiles.
const FEW_ROWS: usize = 2 * GROUP_TILE_ROWS;

/// What was found gives way to one kernel whose groups of columns leave, or whose rows arrive, group by group, where the simulator says that
/// this takes less than this part of it: what is predicted of groups under one kernel was measured to be off by as much.
const LEAST_GAIN_OF_ONE_KERNEL: f64 = 0.97;

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
                let plan = LinearPlan::new(self.spec, self.topology.world_size, groups.clone())?;
                if self.takes_whole_tiles(cost) && groups != *own && plan.cuts_tiles() {
                    continue;
                }
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

    /// Whether groups of columns may be worth it: sums of few rows travel.
    pub(super) fn has_few_rows(&self) -> bool {
        let collective = GemmCollective::of_pass(&self.spec, self.direction);
        let own = self.spec.tokens.div_ceil(self.topology.world_size);
        !matches!(collective, None | Some(GemmCollective::AllGather))
            && self.topology.world_size > 1
            && own < FEW_ROWS
    }

    /// A way that was found to end first, or, where the simulator says that it ends clearly sooner, one kernel whose groups of columns travel as
    /// they are done.
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub(super) fn in_columns(
        &self,
        ways: &[PassOverlap],
        cost: &CostModel,
        found: (PassOverlap, LinearPlan),
    ) -> Result<(PassOverlap, LinearPlan), PlanError> {
        if !self.has_few_rows() {
            return Ok(found);
        }
        self.in_one_kernel(ways, cost, found, COLUMN_GROUPS.map(WaveGroups::Columns))
    }

    /// A way that was found to end first, or, where the simulator says that it ends clearly sooner, one kernel that takes the rows of other
    /// ranks as they arrive.
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub(super) fn as_rows_arrive(
        &self,
        ways: &[PassOverlap],
        cost: &CostModel,
        found: (PassOverlap, LinearPlan),
    ) -> Result<(PassOverlap, LinearPlan), PlanError> {
        let Some(expected) = ways.iter().find_map(|way| self.groups_as_rows_arrive(*way, cost)) else {
            return Ok(found);
        };
        let equal = EQUAL_GROUPS.map(WaveGroups::Fixed);
        self.in_one_kernel(ways, cost, found, [WaveGroups::Sizes(expected)].into_iter().chain(equal))
    }

    /// What was found, or one kernel of these groups that the simulator says ends clearly sooner.
    fn in_one_kernel(
        &self,
        ways: &[PassOverlap],
        cost: &CostModel,
        found: (PassOverlap, LinearPlan),
        groups: impl IntoIterator<Item = WaveGroups>,
    ) -> Result<(PassOverlap, LinearPlan), PlanError> {
        let Some(&way) = ways.iter().find(|way| way.is_one_kernel()) else { return Ok(found) };
        // As among other ways, kernels that take multiprocessors count for more where others are to be had.
        let has_sparing = ways.iter().any(PassOverlap::spares_workers);
        let rated = |overlap: PassOverlap, plan: &LinearPlan| {
            let rate = if has_sparing && overlap.takes_workers() { WORKERS_COST } else { 1.0 };
            rate * self.simulated(overlap, plan, cost)
        };
        let mut least = LEAST_GAIN_OF_ONE_KERNEL * rated(found.0, &found.1);
        let mut best = found;
        for groups in groups {
            let plan = LinearPlan::new(self.spec, self.topology.world_size, groups)?;
            let seconds = rated(way, &plan);
            if seconds < least {
                (least, best) = (seconds, (way, plan));
            }
        }
        Ok(best)
    }

    /// What the simulator says that it takes so; for ever where it cannot be simulated.
    fn simulated(&self, overlap: PassOverlap, plan: &LinearPlan, cost: &CostModel) -> f64 {
        let Self { spec, topology, direction } = *self;
        let mut clock = SimulatedClock { spec, direction, topology, cost, policy: overlap.into() };
        clock.pass(plan).unwrap_or(f64::INFINITY)
    }
}
