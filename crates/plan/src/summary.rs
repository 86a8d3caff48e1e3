//! The JSON of `counterpoint plan --json`: areas, rows sent and received, and traffic compared with other methods.

use counterpoint_mask::Mask;
use serde::{Deserialize, Serialize};

use crate::{AttentionSpec, Plan, RankPlan, TrafficBounds};

/// A plan in figures, as `counterpoint plan --json` prints it. Token counts are key rows; stages are the forward's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanSummary {
    /// Unmasked pairs.
    pub area: u64,
    /// Number of ranks.
    pub cp_size: usize,
    /// Query rows of a chunk.
    pub chunk_size: usize,
    /// Number of query chunks.
    pub num_chunks: usize,
    /// Seconds that planning took.
    pub solve_seconds: f64,
    /// Largest area of a rank over the mean; 1.0 is perfect.
    pub balance: f64,
    /// By rank.
    pub ranks: Vec<RankSummary>,
    /// What moves.
    pub comm: CommSummary,
}

/// One rank of a [`PlanSummary`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankSummary {
    /// The rank.
    pub rank: usize,
    /// Its query chunks, in the order of its local rows.
    pub chunks: Vec<u32>,
    /// Query rows that it owns.
    pub tokens: usize,
    /// Unmasked pairs that it computes, those of hosted rows included.
    pub area: u64,
    /// Key rows that it receives.
    pub recv_tokens: u64,
    /// Key rows that it sends, each once per destination.
    pub send_tokens: u64,
    /// Query rows of others that it hosts.
    pub query_recv_tokens: u64,
    /// Query rows that it sends to hosts, each once per host.
    pub query_send_tokens: u64,
    /// Unmasked pairs of the rows that it hosts, its own included.
    pub hosted_area: u64,
    /// Global key rows that it receives, merged and sorted, as `[start, end]`.
    pub recv_ranges: Vec<[usize; 2]>,
    /// By stage.
    pub stages: Vec<StageSummary>,
}

/// One stage of a [`RankSummary`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSummary {
    /// Unmasked pairs.
    pub area: u64,
    /// Key rows that it receives.
    pub recv_tokens: u64,
}

/// Rows received by all ranks together; see [`TrafficBounds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommSummary {
    /// Key rows, by this plan.
    pub recv_tokens: u64,
    /// Query rows, by this plan: partial results of as many rows travel back.
    pub query_tokens: u64,
    /// Key rows at least, by any dispatch as balanced as this one where no queries travel.
    pub lower_bound_tokens: u64,
    /// By ring attention.
    pub ring_tokens: u64,
    /// By gathering all keys.
    pub all_gather_tokens: u64,
}

impl PlanSummary {
    /// Sums up `plan`, which must be a plan for `mask` and `spec`. Planning has no clock, so whoever timed it says how long
    /// it took.
    pub fn new(plan: &Plan, mask: &Mask, spec: &AttentionSpec, solve_seconds: f64) -> Self {
        let bounds = TrafficBounds::new(plan, mask, spec);
        Self {
            area: plan.area(),
            cp_size: plan.cp_size(),
            chunk_size: plan.q_dispatch.chunk_size(),
            num_chunks: plan.q_dispatch.num_chunks(),
            solve_seconds,
            balance: plan.balance(),
            ranks: plan
                .ranks
                .iter()
                .map(|rank| RankSummary::new(rank, plan.q_dispatch.chunks(rank.rank)))
                .collect(),
            comm: CommSummary {
                recv_tokens: bounds.recv_tokens,
                query_tokens: plan.ranks.iter().map(RankPlan::query_recv_rows).sum(),
                lower_bound_tokens: bounds.lower_bound_tokens,
                ring_tokens: bounds.ring_tokens,
                all_gather_tokens: bounds.all_gather_tokens,
            },
        }
    }
}

impl RankSummary {
    fn new(rank: &RankPlan, chunks: &[u32]) -> Self {
        Self {
            rank: rank.rank,
            chunks: chunks.to_vec(),
            tokens: rank.q_rows,
            area: rank.area,
            recv_tokens: rank.recv_rows(),
            send_tokens: rank.send_rows(),
            query_recv_tokens: rank.query_recv_rows(),
            query_send_tokens: rank.query_send_rows(),
            hosted_area: rank.hosted.as_ref().map_or(0, |hosted| hosted.area),
            recv_ranges: rank.recv_ranges().iter().map(|range| [range.start, range.end]).collect(),
            stages: rank
                .forward
                .iter()
                .map(|stage| StageSummary { area: stage.area, recv_tokens: stage.part.recv_rows() })
                .collect(),
        }
    }
}
