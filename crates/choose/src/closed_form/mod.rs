//! What a plan is expected to take, stage by stage and rank by rank, by the closed forms of the cost model.

mod direction;
mod link_counts;
mod link_rows;
mod stage_prediction;

use counterpoint_cost::ReadyWork;
use counterpoint_mask::{Band, Range};
use counterpoint_plan::{
    AttentionSpec, HostedWork, Outline, Plan, RankOutline, RankPlan, StageCuts, StagePlan,
};
use serde::{Deserialize, Serialize};

use crate::config::PlanConfig;

pub(crate) use direction::{Direction, StageWork};
pub(crate) use link_counts::LinkCounts;
pub(crate) use link_rows::{LinkRows, busier_rows, busier_rows_of_all};
pub use stage_prediction::StagePrediction;
pub(crate) use stage_prediction::makespan;

/// Predicted seconds of one rank in one direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankPrediction {
    /// By stage.
    pub stages: Vec<StagePrediction>,
    /// Hosted work, after stage 0: the cast is that of queries, the reduce that of partial results.
    pub hosted: Option<StagePrediction>,
    /// From the start to the end of the last stage, what overlaps counted once.
    pub seconds: f64,
}

/// What a plan is expected to take, rank by rank. Ranks are looked at one by one: nobody waits for a late sender. On
/// several nodes it is the flat exchange that is predicted, in which every rank fetches for itself; the two-level
/// exchange of the same plan ([`TwoLevelExchange`](counterpoint_plan::TwoLevelExchange)) crosses the network less.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The forward, by rank.
    pub forward: Vec<RankPrediction>,
    /// The backward, by rank.
    pub backward: Vec<RankPrediction>,
}

impl Prediction {
    /// Predicts `plan` with the machine of `config`, by pairs. Every stage is charged what it really sends and receives. The number
    /// of stages of [`StageCount::Auto`](crate::StageCount::Auto) is chosen by the same measure, and on machines with
    /// [`TileCosts`](counterpoint_cost::TileCosts) by the tiles of each stage.
    pub fn new(plan: &Plan, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        let predict = |direction: Direction, plan: &RankPlan, stages: &[StagePlan]| {
            let stages = stages.iter().map(|stage| {
                let StagePlan { area, own_rows, key_rows, ref bands, .. } = *stage;
                let links = busier_rows(&stage.part, plan.rank, &config.topology);
                StageFigures { area, own_rows, key_rows, bands, links }
            });
            let merged_rows = if plan.is_hosted_in_part() { plan.q_rows } else { 0 };
            let hosted = plan.hosted.as_ref().map(|work| (work, merged_rows));
            let rank = RankFigures { rank: plan.rank, q_rows: plan.q_rows, hosted };
            rank.predict(direction, stages, spec, config)
        };
        let ranks = plan.ranks.iter();
        Self {
            forward: ranks.clone().map(|rank| predict(Direction::Forward, rank, &rank.forward)).collect(),
            backward: ranks.map(|rank| predict(Direction::Backward, rank, &rank.backward)).collect(),
        }
    }

    /// As [`Prediction::new`] of the plan that the outline becomes, whose pieces are only counted.
    pub(crate) fn of_outline(outline: &Outline, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        let predict = |direction: Direction, cuts: &StageCuts| -> Vec<RankPrediction> {
            let links = LinkCounts::new(outline.owners.k_runs(), cuts, outline.ranks.len(), &config.topology);
            let of_rank = |(rank, of_rank): (usize, &RankOutline)| {
                let bands = cuts.bands(rank, of_rank);
                let stages = bands.iter().enumerate().map(|(stage, bands)| {
                    let own_rows = cuts.own_rows(rank, stage);
                    StageFigures {
                        area: bands.iter().map(Band::area).sum(),
                        own_rows,
                        key_rows: own_rows + cuts.rows(rank, stage).iter().map(Range::len).sum::<usize>(),
                        bands,
                        links: links.busier(rank, stage),
                    }
                });
                let hosted = of_rank.hosted.as_ref().map(|work| (work, of_rank.merged_rows()));
                let figures = RankFigures { rank, q_rows: of_rank.q_rows, hosted };
                figures.predict(direction, stages, spec, config)
            };
            outline.ranks.iter().enumerate().map(of_rank).collect()
        };
        Self {
            forward: predict(Direction::Forward, &outline.forward),
            backward: predict(Direction::Backward, &outline.backward),
        }
    }

    /// Seconds of the slowest rank's forward.
    pub fn forward_seconds(&self) -> f64 {
        self.forward.iter().map(|rank| rank.seconds).fold(0.0, f64::max)
    }

    /// Seconds of the slowest rank's backward.
    pub fn backward_seconds(&self) -> f64 {
        self.backward.iter().map(|rank| rank.seconds).fold(0.0, f64::max)
    }
}

/// What the prediction of a stage follows from.
struct StageFigures<'a> {
    area: u64,
    own_rows: usize,
    /// With own ones; of stage 0 not looked at.
    key_rows: usize,
    bands: &'a [Band],
    links: LinkRows,
}

/// What that of a rank follows from, besides its stages.
struct RankFigures<'a> {
    rank: usize,
    q_rows: usize,
    /// With the query rows whose results are made of what hosts and stages compute.
    hosted: Option<(&'a HostedWork, usize)>,
}

impl RankFigures<'_> {
    fn predict<'a>(
        &self,
        direction: Direction,
        stages: impl Iterator<Item = StageFigures<'a>>,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> RankPrediction {
        let predict = |(index, stage): (usize, StageFigures<'a>)| {
            let StageFigures { area, own_rows, key_rows, bands, links } = stage;
            let remote = index > 0 && own_rows == 0;
            let work = StageWork { area, q_rows: self.q_rows, own_rows, remote };
            let predicted = direction.predict(work, links, spec, &config.cost);
            match own_rows {
                0 => predicted,
                _ => {
                    let ready = ReadyWork::of(bands, own_rows);
                    predicted.as_rows_arrive(&ready, key_rows - own_rows, spec, &config.cost)
                }
            }
        };
        let stages: Vec<StagePrediction> = stages.enumerate().map(predict).collect();
        let hosted = self.hosted.map(|(hosted, merged_rows)| {
            let rows = busier_rows(&hosted.part, self.rank, &config.topology);
            direction.predict_hosted(hosted, rows, merged_rows, spec, &config.cost)
        });
        let (local, remote) = stages.split_at(1);
        let seconds = makespan(local.iter().chain(&hosted).chain(remote).copied());
        RankPrediction { seconds, stages, hosted }
    }
}
