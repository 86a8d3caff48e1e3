//! The type of plans: each rank's rows, stages, work and exchange.

use std::sync::Arc;

use counterpoint_mask::{Band, Range};
use serde::{Deserialize, Serialize};

use crate::exchange::PlacedRows;
use crate::runs::Runs;
use crate::{ByteFormat, Dispatch, GroupPart, HostedWork, Topology, TwoLevelExchange};

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
    /// What it computes for offloaded rows, besides the stages; on every rank or on none.
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

    /// Whether it computes, in stages, for some of its rows for which hosts compute too.
    pub fn is_hosted_in_part(&self) -> bool {
        let bands = self.forward.iter().flat_map(|stage| stage.bands.iter());
        self.hosted.as_ref().is_some_and(|hosted| hosted.is_in_part(bands))
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
    /// On several nodes queries that travel go to each host by itself, whatever keys do: of few rows a step more takes longer than what it saves.
    #[serde(default)]
    pub queries_go_straight: bool,
    /// How the same rows travel on several nodes, where they are to travel in two steps; see [`Plan::over_nodes`].
    pub two_level: Option<TwoLevelExchange>,
}

impl Plan {
    /// How plans are written for other processes. The number counts up when they have other fields, or mean something else by them: a test of
    /// crate `choose` has recorded one.
    pub const BYTES: ByteFormat = ByteFormat::new(*b"CPPL", "plan", 1);

    /// The two levels of its exchange, whose ranks are laid out as `topology` says. On one node only the near part is not empty, and is
    /// the flat exchange.
    ///
    /// # Panics
    /// When `topology` is not for as many ranks as the plan.
    pub fn two_levels(&self, topology: &Topology) -> TwoLevelExchange {
        assert_eq!(topology.world_size, self.cp_size(), "the topology must be that of the plan's ranks");
        let runs = Runs::new(&self.k_dispatch);
        let received = |stages: fn(&RankPlan) -> &[StagePlan]| {
            let all = 0..stages(&self.ranks[0]).len();
            all.map(move |stage| {
                self.ranks.iter().map(|rank| placed(&stages(rank)[stage..=stage])).collect::<Vec<_>>()
            })
        };
        let whole: Vec<Vec<PlacedRows>> = self.ranks.iter().map(|rank| placed(&rank.backward)).collect();
        let [forward, backward] = [received(|rank| &rank.forward), received(|rank| &rank.backward)];
        let of_keys = TwoLevelExchange::of(&runs, topology, forward, backward, &whole);
        let hosted = self.ranks.iter().map(|rank| Some(PlacedRows::of(&rank.hosted.as_ref()?.q_ranges, 0)));
        match hosted.collect::<Option<Vec<_>>>() {
            Some(hosted) => of_keys.with_hosted(&Runs::new(&self.q_dispatch), topology, &hosted),
            None => of_keys,
        }
    }

    /// Key rows that cross between nodes in a forward when every rank fetches for itself.
    pub fn flat_inter_node_rows(&self, topology: &Topology) -> u64 {
        let inter_node = |rank: usize, stage: &StagePlan| -> u64 {
            let far = |owner: u32| topology.node(owner as usize) != topology.node(rank);
            stage
                .part
                .remote
                .iter()
                .filter(|split| far(split.rank))
                .map(|split| split.rows.len() as u64)
                .sum()
        };
        self.ranks.iter().flat_map(|rank| rank.forward.iter().map(|stage| inter_node(rank.rank, stage))).sum()
    }

    /// Query rows that cross between nodes when each goes to every host by itself.
    pub fn flat_query_inter_node_rows(&self, topology: &Topology) -> u64 {
        let hosted = self.ranks.iter().filter_map(|rank| Some((rank.rank, rank.hosted.as_ref()?)));
        let of_rank = |(rank, hosted): (usize, &HostedWork)| -> u64 {
            let far = |owner: u32| topology.node(owner as usize) != topology.node(rank);
            let splits = hosted.part.remote.iter().filter(|split| far(split.rank));
            splits.map(|split| split.rows.len() as u64).sum()
        };
        hosted.map(of_rank).sum()
    }

    /// The plan with its exchange in two steps, between nodes and inside each, for ranks that are laid out as `topology` says.
    /// On one node it stays as it is. Of queries those steps are left out where they [go straight](Self::queries_go_straight).
    ///
    /// # Panics
    /// When `topology` is not for as many ranks as the plan.
    pub fn over_nodes(self, topology: &Topology) -> Plan {
        let mut two_level = (topology.nodes() > 1).then(|| self.two_levels(topology));
        if let Some(exchange) = two_level.as_mut().filter(|_| self.queries_go_straight) {
            exchange.hosted.clear();
        }
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

/// What the stages receive, their key buffers laid one after the other.
fn placed(stages: &[StagePlan]) -> Vec<PlacedRows> {
    let rows: Vec<Range> = stages.iter().flat_map(|stage| &stage.recv_ranges).copied().collect();
    // Own rows are in one stage only, and then nothing is received before it.
    PlacedRows::of(&rows, stages.iter().map(|stage| stage.own_rows).sum())
}
