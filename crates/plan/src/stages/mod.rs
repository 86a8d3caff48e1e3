//! Cutting each rank's remote work into stages whose communication hides under the computation of earlier ones.

mod profile;
mod solver;
mod traffic;

use counterpoint_mask::{Band, Range};

use crate::outline::RankOutline;
use crate::runs::Runs;
use crate::work::{KeySegment, cut_into_stages};
use crate::{AttentionSpec, PlanConfig, StageCount};

use profile::Profile;
use solver::{Cuts, Rates};
use traffic::Traffic;

/// The cuts of every rank's list of remote rows, for one direction.
pub(crate) struct StageCuts {
    stages: usize,
    /// `rows[rank * stages + stage]`: global key rows received; empty for stage 0.
    rows: Vec<Vec<Range>>,
}

impl StageCuts {
    /// `places[rank]` are the `stages` ends of the remote stages in the rank's list, stage 0 included as 0.
    fn new(ranks: &[RankOutline], places: &[Vec<usize>], stages: usize) -> Self {
        let mut rows = Vec::with_capacity(ranks.len() * stages);
        for (outline, places) in ranks.iter().zip(places) {
            rows.push(Vec::new());
            rows.extend(places.windows(2).map(|cut| outline.remote.rows(cut[0], cut[1])));
        }
        Self { stages, rows }
    }

    /// Stage 0 alone.
    fn local(ranks: usize) -> Self {
        Self { stages: 1, rows: vec![Vec::new(); ranks] }
    }

    /// Number of stages, stage 0 included.
    pub(crate) fn stages(&self) -> usize {
        self.stages
    }

    /// Global key rows that `rank` receives in `stage`, merged and ascending.
    pub(crate) fn rows(&self, rank: usize, stage: usize) -> &[Range] {
        &self.rows[rank * self.stages + stage]
    }

    /// As [`StageCuts::rows`], of all ranks.
    pub(crate) fn rows_of_all(&self, stage: usize) -> Vec<&[Range]> {
        (0..self.rows.len() / self.stages).map(|rank| self.rows(rank, stage)).collect()
    }

    /// The bands of every stage of `rank`.
    pub(crate) fn bands(&self, rank: usize, outline: &RankOutline) -> Vec<Vec<Band>> {
        let mut segments = Vec::with_capacity(outline.own.len() + outline.remote.ranges.len() + self.stages);
        let mut add = |stage: usize, rows: &[Range]| {
            let mut start = 0;
            for &range in rows {
                segments.push(KeySegment { range, stage, start });
                start += range.len();
            }
        };
        add(0, &outline.own);
        for stage in 1..self.stages {
            add(stage, self.rows(rank, stage));
        }
        segments.sort_unstable_by_key(|segment| segment.range.start);
        cut_into_stages(&outline.work, &segments, self.stages)
    }
}

/// Pieces of a list of remote rows between places where it may be cut. Solving takes time in the square of it, and more of
/// them gain next to nothing: a stage's end is then known to a sixteenth of the list. More stages than
/// these, asked for, are cut evenly.
const CELLS: usize = 16;

/// Remote stages that [`StageCount::Auto`] tries. Each one costs a launch and a collective on every rank.
const MOST_AUTO_STAGES: usize = 8;

/// Cuts for the forward and for the backward.
pub(crate) fn cut(
    ranks: &[RankOutline],
    runs: &Runs,
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> [StageCuts; 2] {
    let (most, cells) = match config.stages {
        _ if ranks.iter().all(|rank| rank.remote.len() == 0) => (0, 0),
        StageCount::Auto => (MOST_AUTO_STAGES, CELLS),
        StageCount::Fixed(stages) => (stages, CELLS.max(stages)),
    };
    if most == 0 {
        return [(), ()].map(|()| StageCuts::local(ranks.len()));
    }
    let profiles: Vec<Profile> = ranks.iter().map(|rank| Profile::new(rank, runs, cells)).collect();
    let traffic = Traffic::new(ranks, runs, &config.topology);
    [Direction::Forward, Direction::Backward].map(|direction| {
        let solved: Vec<Cuts> = profiles
            .iter()
            .enumerate()
            .map(|(rank, profile)| {
                let received = ranks[rank].remote.len() as u64;
                let rates =
                    direction.rates(spec, config, received, traffic.sent[rank], traffic.crossing[rank]);
                Cuts::solve(profile, &rates, most)
            })
            .collect();
        let stages = match config.stages {
            StageCount::Auto => slowest_first(&solved, most),
            StageCount::Fixed(stages) => stages,
        };
        let places: Vec<Vec<usize>> = profiles
            .iter()
            .zip(&solved)
            .map(|(profile, solved)| {
                let m = match config.stages {
                    StageCount::Auto => solved.best_up_to(stages),
                    StageCount::Fixed(_) => solved.most_up_to(stages),
                };
                let mut places: Vec<usize> =
                    solved.cut(m).iter().map(|&index| profile.places[index as usize]).collect();
                // The rank's last stages are idle, and it takes part in their collectives all the same.
                places.resize(stages + 1, places[m]);
                places
            })
            .collect();
        StageCuts::new(ranks, &places, stages + 1)
    })
}

/// The number of remote stages with which the slowest rank ends first; the smallest such number.
fn slowest_first(solved: &[Cuts], most: usize) -> usize {
    let slowest = |stages: usize| solved.iter().map(|cuts| cuts.seconds_up_to(stages)).fold(0.0, f64::max);
    let mut best = (1, slowest(1));
    for stages in 2..=most {
        let seconds = slowest(stages);
        if seconds < best.1 {
            best = (stages, seconds);
        }
    }
    best.0
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

impl Direction {
    /// What a rank's stages cost that receives, sends and takes from other nodes so many rows in all. A stage's transfer
    /// takes as long as the busier side of it; which rows others fetch when is not known while everybody's cuts are still
    /// open, so a rank's sending is spread over its stages as its receiving is.
    fn rates(
        self,
        spec: &AttentionSpec,
        config: &PlanConfig,
        received: u64,
        sent: u64,
        crossing: u64,
    ) -> Rates {
        let cost = &config.cost;
        let busier = received.max(sent) as f64 / received.max(1) as f64;
        let crossing_share = crossing as f64 / received.max(1) as f64;
        let near = busier / cost.link.bytes_per_second;
        let far = busier * crossing_share / cost.network.bytes_per_second;
        let byte = near.max(far);
        let alpha = match crossing {
            0 => cost.link.alpha_seconds,
            _ => cost.link.alpha_seconds.max(cost.network.alpha_seconds),
        };
        let cast_row = spec.kv_row_bytes() as f64 * byte;
        let (pair, reduce_alpha, reduce_row) = match self {
            Direction::Forward => (spec.flops_forward(1) / cost.forward_flops_per_second, 0.0, 0.0),
            Direction::Backward => {
                let reduce_row = spec.kv_gradient_row_bytes() as f64 * byte;
                (spec.flops_backward(1) / cost.backward_flops_per_second, alpha, reduce_row)
            }
        };
        Rates { launch: cost.launch_seconds, pair, cast_alpha: alpha, cast_row, reduce_alpha, reduce_row }
    }
}
