//! A plan in figures, of as many ranks as there may be: no rank's pieces are written down.

use counterpoint_mask::{Band, Mask, Range};
use counterpoint_plan::{
    AttentionSpec, CommSummary, Outline, PlanSummary, Planning, RankSummary, StageSummary, TrafficBounds,
};

use crate::closed_form::{LinkCounts, Prediction};
use crate::config::PlanConfig;
use crate::error::ChooseError;
use crate::hosts::UnweighedOffload;
use crate::planner::outline;

/// What a plan comes to, figures alone: a plan of thousands of ranks has hundreds of millions of pieces, which a rank makes for
/// itself ([`plan_rank`](crate::plan_rank)) and nobody needs all of.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanOverview {
    /// As of the plan itself.
    pub summary: PlanSummary,
    /// As of the plan itself.
    pub prediction: Prediction,
    /// Other ways to distribute the same attention.
    pub bounds: TrafficBounds,
    /// Key rows that cross between nodes in a forward when every rank fetches for itself.
    pub inter_node_rows: u64,
    /// Bytes that the pieces of all ranks would take, about.
    pub plan_bytes: u64,
    /// Query offload that was asked for and is not in this plan, because weighing it would take too long.
    pub unweighed: Option<UnweighedOffload>,
}

impl PlanOverview {
    /// Plans `mask` as [`plan_mask`](crate::plan_mask) does, in the way that `planning` says, and keeps the figures. Whoever times it fills in the seconds.
    ///
    /// # Errors
    /// As [`plan_mask`](crate::plan_mask); [`PlanError::Cancelled`](counterpoint_plan::PlanError::Cancelled).
    pub fn new(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Self, ChooseError> {
        let (outline, unweighed) = outline(mask, spec, config, planning)?;
        let dispatches = [outline.owners.q_dispatch(), outline.owners.k_dispatch()];
        let links =
            LinkCounts::new(outline.owners.k_runs(), &outline.forward, outline.ranks.len(), &config.topology);
        let ranks: Vec<RankSummary> =
            planning.map(outline.ranks.len(), |rank| rank_summary(&outline, rank, &links))?;
        let area = ranks.iter().map(|rank| rank.area).sum::<u64>();
        let most = ranks.iter().map(|rank| rank.area).max().unwrap_or(0);
        let recv_tokens = ranks.iter().map(|rank| rank.recv_tokens).sum();
        let bounds = TrafficBounds::of_dispatches(recv_tokens, dispatches, mask, spec);
        let inter_node =
            (0..ranks.len()).flat_map(|rank| (1..outline.forward.stages()).map(move |stage| (rank, stage)));
        Ok(Self {
            inter_node_rows: inter_node.map(|(rank, stage)| links.received(rank, stage).far).sum(),
            plan_bytes: outline.plan_bytes(),
            unweighed,
            prediction: Prediction::of_outline(&outline, spec, config),
            summary: PlanSummary {
                area,
                cp_size: ranks.len(),
                chunk_size: outline.owners.q_dispatch().chunk_size(),
                num_chunks: outline.owners.q_dispatch().num_chunks(),
                solve_seconds: 0.0,
                balance: if area == 0 { 1.0 } else { most as f64 * ranks.len() as f64 / area as f64 },
                comm: CommSummary {
                    recv_tokens,
                    query_tokens: ranks.iter().map(|rank| rank.query_recv_tokens).sum(),
                    lower_bound_tokens: bounds.lower_bound_tokens,
                    ring_tokens: bounds.ring_tokens,
                    all_gather_tokens: bounds.all_gather_tokens,
                },
                ranks,
            },
            bounds,
        })
    }
}

fn rank_summary(outline: &Outline, rank: usize, links: &LinkCounts) -> RankSummary {
    let (of_rank, cuts) = (&outline.ranks[rank], &outline.forward);
    let hosted = of_rank.hosted.as_ref();
    let hosted_area = hosted.map_or(0, |hosted| hosted.area);
    let received = |stage| cuts.rows(rank, stage).iter().map(Range::len).sum::<usize>() as u64;
    let stages: Vec<StageSummary> = cuts
        .bands(rank, of_rank)
        .iter()
        .enumerate()
        .map(|(stage, bands)| StageSummary {
            area: bands.iter().map(Band::area).sum(),
            recv_tokens: received(stage),
        })
        .collect();
    let sent = |stage| {
        let sent = links.sent(rank, stage);
        sent.near + sent.far
    };
    let recv_ranges =
        Range::merged((0..cuts.stages()).flat_map(|stage| cuts.rows(rank, stage)).copied().collect());
    RankSummary {
        rank,
        chunks: outline.owners.q_dispatch().chunks(rank).to_vec(),
        tokens: of_rank.q_rows,
        area: stages.iter().map(|stage| stage.area).sum::<u64>() + hosted_area,
        recv_tokens: stages.iter().map(|stage| stage.recv_tokens).sum(),
        send_tokens: (0..cuts.stages()).map(sent).sum(),
        query_recv_tokens: hosted.map_or(0, |hosted| hosted.recv_rows(rank)),
        query_send_tokens: hosted.map_or(0, |hosted| hosted.send_rows(rank)),
        hosted_area,
        recv_ranges: recv_ranges.iter().map(|range| [range.start, range.end]).collect(),
        stages,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::QueryExchange;
    use crate::pass_stages::StageCount;
    use crate::{plan_mask, plan_mask_within};
    use counterpoint_plan::{DType, PlanError, Topology};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The figures of the plan itself, to the last bit.
        #[test]
        fn figures_are_those_of_the_plan(
            lengths in proptest::collection::vec(1..700_usize, 1..6),
            ranks in 1..9_usize, ranks_per_node in 1..9_usize, chunk_size in 16..200_usize,
            kind in 0..3_usize, stages in 0..5_usize, exchange in 0..3_usize, on_cpu: bool,
        ) {
            let documents = counterpoint_mask::Documents::from_lengths(lengths).unwrap();
            let mask = match kind {
                0 => Mask::causal(documents),
                1 => Mask::full(documents),
                _ => Mask::last_global(documents, 1, 40),
            }
            .unwrap();
            let spec = AttentionSpec::new(8, 4, 64, DType::Bf16);
            let mut config = PlanConfig {
                chunk_size: Some(chunk_size),
                stages: [StageCount::Auto, StageCount::Fixed(0), StageCount::Fixed(1), StageCount::Fixed(3), StageCount::Auto][stages].into(),
                query_exchange: [QueryExchange::Never, QueryExchange::Auto, QueryExchange::FewestBytes][exchange],
                topology: Topology { world_size: ranks, ranks_per_node: ranks_per_node.min(ranks) },
                ..PlanConfig::new(ranks)
            };
            if on_cpu {
                config.cost.tiles = None;
                config.cost.forward_flops_per_second = 1e11;
            }
            let plan = plan_mask(&mask, &spec, &config).unwrap();
            let overview = PlanOverview::new(&mask, &spec, &config, &Planning::ALONE).unwrap();
            prop_assert_eq!(&overview.summary, &PlanSummary::new(&plan, &mask, &spec, 0.0));
            prop_assert_eq!(&overview.prediction, &Prediction::new(&plan, &spec, &config));
            prop_assert_eq!(overview.bounds, TrafficBounds::new(&plan, &mask, &spec));
            prop_assert_eq!(overview.inter_node_rows, plan.flat_inter_node_rows(&config.topology));
            // Pieces that are there are counted, and no more than half of them are cut further.
            let stages = plan.ranks.iter().flat_map(|rank| rank.forward.iter().chain(&rank.backward));
            let pieces: usize = stages.map(|stage| stage.part.remote.len()).sum();
            let bytes = (pieces * 28) as u64;
            prop_assert!(overview.plan_bytes <= bytes && bytes <= 8 * overview.plan_bytes, "{} {bytes}", overview.plan_bytes);
            prop_assert_eq!(overview.unweighed, None);
            prop_assert_eq!(plan_mask_within(&mask, &spec, &config, overview.plan_bytes, &Planning::ALONE), Ok(plan));
            if overview.plan_bytes > 0 {
                let refused = plan_mask_within(&mask, &spec, &config, overview.plan_bytes - 1, &Planning::ALONE).unwrap_err();
                let is_memory = matches!(refused, ChooseError::Plan(PlanError::Memory { .. }));
                prop_assert!(is_memory, "{}", refused);
            }
        }
    }
}
