//! The type of plans: each rank's rows, stages, work and exchange, with the ways to make one.

use std::sync::Arc;

use counterpoint_mask::{Band, Mask, Range};
use serde::{Deserialize, Serialize};

use crate::outline::Outline;
use crate::{
    AttentionSpec, Dispatch, GroupPart, HostedWork, PlanConfig, PlanError, Planning, Topology,
    TwoLevelExchange,
};

/// One stage of one rank. Stage 0 is the local work: its key buffer is the rank's own key rows and nothing moves.
/// Stage `s > 0` has a key buffer of its own, filled by one group-cast.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePlan {
    /// This rank's part in the stage's group-cast (and, mirrored, in the group-reduce of dk and dv): `owned` rows are
    /// rows of the rank's own keys, `remote` rows are rows of the stage's key buffer. Empty for stage 0.
    pub part: GroupPart,
    /// Global key rows that the stage receives, in the order of the stage's key buffer. Stages are cuts of one list, whose order
    /// is fixed by the dispatch and starts each rank at another owner, so that owners send evenly in every stage.
    pub recv_ranges: Vec<Range>,
    /// The rank's own rows with which the key buffer begins, in a stage that does all of the plan's work at once; what it
    /// receives lies behind them. 0 in any other stage.
    pub own_rows: usize,
    /// Rows of the stage's key buffer.
    pub key_rows: usize,
    /// The work: rows are the rank's local query rows, columns are rows of the stage's key buffer. Sorted.
    pub bands: Arc<[Band]>,
    /// Unmasked pairs.
    pub area: u64,
}

/// One rank's part of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlan {
    /// The rank.
    pub rank: usize,
    /// Global query rows it owns, merged and ascending: its local query rows in order.
    pub q_ranges: Vec<Range>,
    /// Global key rows it owns, likewise.
    pub k_ranges: Vec<Range>,
    /// Number of local query rows.
    pub q_rows: usize,
    /// Number of local key rows.
    pub k_rows: usize,
    /// Unmasked pairs that it computes, those of hosted rows included.
    pub area: u64,
    /// Stages of the forward; every rank has the same number.
    pub forward: Vec<StagePlan>,
    /// Stages of the backward, cut on their own.
    pub backward: Vec<StagePlan>,
    /// What it computes for rows that are away, beside the stages; on every rank or on none.
    pub hosted: Option<HostedWork>,
}

impl RankPlan {
    /// Key rows that it receives in a forward, over all stages.
    pub fn recv_rows(&self) -> u64 {
        self.forward.iter().map(|stage| stage.part.recv_rows()).sum()
    }

    /// Key rows that it sends in a forward, each counted once per destination, over all stages.
    pub fn send_rows(&self) -> u64 {
        self.forward.iter().map(|stage| stage.part.send_rows()).sum()
    }

    /// Query rows of others that it hosts.
    pub fn query_recv_rows(&self) -> u64 {
        self.hosted.as_ref().map_or(0, |hosted| hosted.recv_rows(self.rank))
    }

    /// Query rows that it sends to hosts, each counted once per host.
    pub fn query_send_rows(&self) -> u64 {
        self.hosted.as_ref().map_or(0, |hosted| hosted.send_rows(self.rank))
    }

    /// Global key rows that it receives over all stages, merged and ascending.
    pub fn recv_ranges(&self) -> Vec<Range> {
        Range::merged(self.forward.iter().flat_map(|stage| &stage.recv_ranges).copied().collect())
    }
}

/// Who computes what and who sends what, for one mask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Query rows to ranks.
    pub q_dispatch: Dispatch,
    /// Key rows to ranks; the same as `q_dispatch` for self-attention.
    pub k_dispatch: Dispatch,
    /// Every rank's part.
    pub ranks: Vec<RankPlan>,
    /// How the same rows travel on several nodes, where they are to travel in two steps; see [`Plan::over_nodes`].
    pub two_level: Option<TwoLevelExchange>,
}

impl Plan {
    /// Plans `mask`. Where the lengths of queries and keys agree it is self-attention: one dispatch for both, so that
    /// token `i`'s query and key live on the same rank. Where they do not, as [`Plan::cross_attention`].
    ///
    /// # Errors
    /// A `config` that does not make sense for `mask`; see [`PlanConfig::validate_for`].
    pub fn new(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<Plan, PlanError> {
        let planning = &Planning::ALONE;
        Outline::new(mask, spec, config, planning)?.into_plan(planning)
    }

    /// Plans `mask` with queries and keys dispatched each by a solve of its own, whatever their lengths.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn cross_attention(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Plan, PlanError> {
        let planning = &Planning::ALONE;
        Outline::cross_attention(mask, spec, config, planning)?.into_plan(planning)
    }

    /// Plans another mask of the same training step on this plan's dispatch: rows stay where they are, exchange and
    /// stages are those of `mask`. `config`'s chunk size and dispatch algorithm are not looked at.
    ///
    /// # Errors
    /// As [`Plan::new`]; a mask whose lengths are not those of this plan's mask.
    pub fn for_mask_on(
        &self,
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Plan, PlanError> {
        let dispatches = [&self.q_dispatch, &self.k_dispatch].map(Dispatch::clone);
        Outline::on(mask, spec, config, dispatches)?.into_plan(&Planning::ALONE)
    }

    /// The plan with its exchange in two steps, between nodes and inside each, for ranks that are laid out as `topology` says.
    /// On one node it stays as it is.
    ///
    /// # Panics
    /// When `topology` is not for as many ranks as the plan.
    pub fn over_nodes(self, topology: &Topology) -> Plan {
        let two_level = (topology.nodes() > 1).then(|| TwoLevelExchange::new(&self, topology));
        Plan { two_level, ..self }
    }

    /// The part of `rank`.
    ///
    /// # Panics
    /// When `rank` is not below the number of ranks.
    pub fn rank(&self, rank: usize) -> &RankPlan {
        &self.ranks[rank]
    }

    /// Number of ranks.
    pub fn cp_size(&self) -> usize {
        self.ranks.len()
    }

    /// Unmasked pairs of the mask.
    pub fn area(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.area).sum()
    }

    /// The largest area of a rank over the mean; 1.0 is perfect, also for a mask without a pair.
    pub fn balance(&self) -> f64 {
        let most = self.ranks.iter().map(|rank| rank.area).max().unwrap_or(0);
        match self.area() {
            0 => 1.0,
            area => most as f64 * self.cp_size() as f64 / area as f64,
        }
    }

    /// Key rows that travel in a forward: `[owner * cp_size + receiver]`.
    pub fn communication_matrix(&self) -> Vec<u64> {
        let ranks = self.cp_size();
        let mut matrix = vec![0; ranks * ranks];
        for rank in &self.ranks {
            for split in rank.forward.iter().flat_map(|stage| &stage.part.remote) {
                matrix[split.rank as usize * ranks + rank.rank] += split.rows.len() as u64;
            }
        }
        matrix
    }
}

/// The part of `rank` alone, equal to `Plan::new(mask, spec, config)?.rank(rank)` and cheaper: bands and splits of other
/// ranks are not made.
///
/// # Errors
/// As [`Plan::new`]; a rank that is not below the number of ranks.
pub fn plan_rank(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    rank: usize,
) -> Result<RankPlan, PlanError> {
    let outline = Outline::new(mask, spec, config, &Planning::ALONE)?;
    if rank >= outline.ranks.len() {
        return Err(PlanError::Rank { rank, cp_size: outline.ranks.len() });
    }
    Ok(outline.into_rank(rank))
}
