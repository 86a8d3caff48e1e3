//! What stages take by the tiles that their kernels compute: slower to find than by pairs, and right where documents are short.

use counterpoint_cost::{AttentionWork, CostModel, ReadyWork};
use counterpoint_mask::{Band, Range};
use counterpoint_plan::{AttentionSpec, PlanError, Planning, RankOutline, StageCuts};

use crate::closed_form::{Direction, LinkRows, StagePrediction, makespan};
use crate::whole_work::whole_work;

/// Ranks that are looked at: of many ranks those that are slowest by pairs, which are hardly ever all wrong.
pub(super) const PROBED: usize = 4;

/// The ranks of the largest of `seconds`, at most [`PROBED`], of equal ones the first.
pub(super) fn slowest(seconds: &[f64]) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..seconds.len()).collect();
    ranks.sort_by(|&a, &b| seconds[b].total_cmp(&seconds[a]).then(a.cmp(&b)));
    ranks.truncate(PROBED);
    ranks
}

/// The cuts of the candidate that takes the fewest seconds; of equal ones the first. `seconds(candidate, limit)` are those of one, or
/// anything beyond `limit` where they are more.
pub(super) fn quickest(
    candidates: Vec<Candidate>,
    planning: &Planning<'_>,
    seconds: impl Fn(&Candidate, f64) -> f64 + Sync,
) -> Result<StageCuts, PlanError> {
    let mut known = vec![None; candidates.len()];
    if planning.has_helpers() {
        known = planning.map(candidates.len(), |at| Some(seconds(&candidates[at], f64::INFINITY)))?;
    }
    let mut best = (f64::INFINITY, StageCuts::local(0));
    // From the last one on, where all work is done at once, which mostly is the quickest: the others need no look beyond it.
    for (candidate, known) in candidates.into_iter().zip(known).rev() {
        planning.check()?;
        let seconds = known.unwrap_or_else(|| seconds(&candidate, best.0));
        if seconds <= best.0 {
            best = (seconds, candidate.cuts);
        }
    }
    Ok(best.1)
}

/// One way to cut, and what its ranks' links carry in each remote stage.
pub(super) struct Candidate {
    pub(super) cuts: StageCuts,
    /// `[rank][stage - 1]`.
    pub(super) links: Vec<Vec<LinkRows>>,
}

impl Candidate {
    /// Seconds of the slowest of the `probed` ranks; of the first ones, where these take more than `limit`.
    pub(super) fn seconds(
        &self,
        direction: Direction,
        ranks: &[RankOutline],
        hosted: &[Option<StagePrediction>],
        (probed, limit): (&[usize], f64),
        (spec, cost): (&AttentionSpec, &CostModel),
        planning: &Planning<'_>,
    ) -> f64 {
        let of_rank = |rank: usize| {
            let stages = self.stages(direction, rank, &ranks[rank], (spec, cost), planning);
            let (local, remote) = stages.split_at(1);
            let delta = direction.delta(ranks[rank].q_rows, spec, cost);
            makespan(delta.into_iter().chain(local.iter().chain(&hosted[rank]).chain(remote).copied()))
        };
        let mut slowest: f64 = 0.0;
        for &rank in probed {
            slowest = slowest.max(of_rank(rank));
            if slowest > limit {
                break;
            }
        }
        slowest
    }

    fn stages(
        &self,
        direction: Direction,
        rank: usize,
        outline: &RankOutline,
        (spec, cost): (&AttentionSpec, &CostModel),
        planning: &Planning<'_>,
    ) -> Vec<StagePrediction> {
        let bands = self.cuts.bands(rank, outline);
        let has_work = |stage: &usize| !bands[*stage].is_empty();
        let first = (0..bands.len()).find(has_work);
        let last = (0..bands.len()).rfind(has_work);
        let mut computed = 0.0;
        let stage = |stage: usize| {
            let (from, rows) = (self.cuts.own_rows(rank, stage), self.cuts.rows(rank, stage));
            let received = rows.iter().map(Range::len).sum::<usize>();
            let k_rows = match stage {
                0 => outline.own_rows(),
                _ => from + received,
            };
            let place = Place { begins: Some(stage) == first, ends: Some(stage) == last };
            let links = match stage {
                0 => LinkRows::default(),
                _ => self.links[rank][stage - 1],
            };
            let mut compute_seconds = 0.0;
            if !bands[stage].is_empty() {
                let rows = [outline.q_rows, k_rows];
                compute_seconds =
                    direction.tiles_seconds(&bands[stage], rows, place, computed, (spec, cost), planning);
                computed += compute_seconds;
            }
            let copies = direction.own_seconds(from, spec, cost);
            let compute_seconds = compute_seconds + copies;
            let predicted = StagePrediction { compute_seconds, ..direction.transfers(links, spec, cost) };
            match from {
                0 => predicted,
                _ => predicted.as_rows_arrive(&ReadyWork::of(&bands[stage], from), received, spec, cost),
            }
        };
        (0..bands.len()).map(stage).collect()
    }
}

/// Where a stage is among those that compute.
#[derive(Clone, Copy)]
struct Place {
    /// Nothing is before it.
    begins: bool,
    /// Nothing comes after it.
    ends: bool,
}

impl Direction {
    /// Seconds to compute `bands` of so many query and key rows, after `computed_seconds`.
    fn tiles_seconds(
        self,
        bands: &[Band],
        [q_rows, k_rows]: [usize; 2],
        place: Place,
        computed_seconds: f64,
        (spec, cost): (&AttentionSpec, &CostModel),
        planning: &Planning<'_>,
    ) -> f64 {
        let sum = spec.dtype.accumulator().size();
        let rows_of = |elements: usize| (q_rows * spec.heads_q * elements * sum) as u64;
        let (state, dq) = (rows_of(spec.head_dim_v + 2), rows_of(spec.head_dim));
        let passed_bytes = match self {
            // A tile waits for its state before it can end, so it is read at half the rate.
            Direction::Forward => 2 * state * u64::from(!place.begins) + state * u64::from(!place.ends),
            // Sums are cleared, or read and written once more.
            Direction::Backward => dq * if place.begins { 1 } else { 2 },
        };
        let work = AttentionWork {
            staged: !(place.begins && place.ends),
            passed_bytes,
            computed_seconds,
            ..whole_work(spec, bands, [q_rows, k_rows], planning)
        };
        match self {
            Direction::Forward => cost.forward_seconds(&work),
            Direction::Backward => cost.backward_seconds(&work),
        }
    }

    /// The statistic of rows that a backward begins with; keys travel meanwhile.
    fn delta(self, q_rows: usize, spec: &AttentionSpec, cost: &CostModel) -> Option<StagePrediction> {
        let bytes = 2 * q_rows * spec.heads_q * spec.head_dim_v * spec.dtype.size();
        let compute_seconds = cost.launch_seconds + bytes as f64 / cost.memory_bytes_per_second;
        (self == Direction::Backward).then_some(StagePrediction { compute_seconds, ..Default::default() })
    }
}
