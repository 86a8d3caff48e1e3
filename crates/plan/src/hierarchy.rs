//! The exchange over several nodes: a row, of keys or of queries, crosses the network once for each node, and is cast on inside it.

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use crate::exchange::{PlacedRows, sweep};
use crate::runs::Runs;
use crate::{GroupPart, OwnedSplit, RemoteSplit, Topology};

/// One rank's part in a group-cast in two steps: between nodes, then inside each node.
///
/// Step one brings each row that a node needs and does not own to one rank of that node, its gateway. Step two casts inside
/// the node: own key rows, which does not have to wait for step one, and what step one brought. Together they fill the
/// stage's key buffer, as the flat group-cast does. A gateway that needs a row itself sends it to itself in step two.
///
/// The group-reduce runs the steps backwards: partial results are reduced inside the node before they cross.
///
/// Of queries that travel likewise: for key rows read query rows, for the stage's key buffer that of hosted queries. A rank that hosts rows of
/// its own has them in the near part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TwoLevelPart {
    /// Between nodes. `owned` are own key rows, `remote` are rows of the buffer of step one.
    pub inter: GroupPart,
    /// Inside the node, of own rows. `owned` are own key rows, `remote` are rows of the stage's key buffer.
    pub near: GroupPart,
    /// Inside the node, of rows of other nodes. `owned` are rows of the buffer of step one, `remote` are rows of the stage's key
    /// buffer.
    pub forward: GroupPart,
    /// Rows of the buffer of step one.
    pub inter_rows: usize,
}

/// The exchange of a plan on several nodes: a row that several ranks of a node need crosses the network once. Stages are
/// cut and a prediction (crate `choose`) is made for the flat exchange, as if every rank fetched for itself, so what
/// they count for the network is an upper bound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TwoLevelExchange {
    /// Forward parts by rank, then stage.
    pub forward: Vec<Vec<TwoLevelPart>>,
    /// Backward parts by rank, then stage.
    pub backward: Vec<Vec<TwoLevelPart>>,
    /// By rank, all stages as one: key buffers laid one after the other. A deterministic backward reduces by it, so that the order
    /// of its sums does not follow the stages.
    pub whole: Vec<TwoLevelPart>,
    /// By rank, of queries to those that host them, and of what these compute back; empty where none do.
    pub hosted: Vec<TwoLevelPart>,
}

impl TwoLevelExchange {
    /// Of ranks that are laid out as `topology` says: what each of them receives in the stages of a forward and of a backward, one after
    /// the other, and in all stages of a backward as one. On one node only the near part is not empty, and is the flat exchange.
    pub(crate) fn of(
        runs: &Runs,
        topology: &Topology,
        forward: impl Iterator<Item = Vec<Vec<PlacedRows>>>,
        backward: impl Iterator<Item = Vec<Vec<PlacedRows>>>,
        whole: &[Vec<PlacedRows>],
    ) -> Self {
        Self {
            forward: by_rank(runs, topology, forward),
            backward: by_rank(runs, topology, backward),
            whole: two_levels(runs, whole, topology),
            hosted: Vec::new(),
        }
    }

    /// The same, with queries to those that host them: the rows that each rank hosts, of the owners of `runs`.
    #[must_use]
    pub(crate) fn with_hosted(self, runs: &Runs, topology: &Topology, hosted: &[Vec<PlacedRows>]) -> Self {
        Self { hosted: two_levels(runs, hosted, topology), ..self }
    }

    /// Key rows that cross between nodes in a forward: in each stage every row once for each node that needs it then and does
    /// not own it. With a single stage that is as few as can be.
    pub fn inter_node_rows(&self) -> u64 {
        self.forward.iter().flatten().map(|part| part.inter.send_rows()).sum()
    }

    /// Likewise in a backward, one way; as many sums of gradients cross back.
    pub fn backward_inter_node_rows(&self) -> u64 {
        self.backward.iter().flatten().map(|part| part.inter.send_rows()).sum()
    }

    /// Query rows that cross between nodes, once for each node that hosts them and does not own them; as many partial results cross back.
    pub fn query_inter_node_rows(&self) -> u64 {
        self.hosted.iter().map(|part| part.inter.send_rows()).sum()
    }
}

/// The parts of all ranks by rank, then stage.
fn by_rank(
    runs: &Runs,
    topology: &Topology,
    stages: impl Iterator<Item = Vec<Vec<PlacedRows>>>,
) -> Vec<Vec<TwoLevelPart>> {
    let mut parts = vec![Vec::new(); topology.world_size];
    for received in stages {
        let stage_parts = two_levels(runs, &received, topology);
        parts.iter_mut().zip(stage_parts).for_each(|(parts, part)| parts.push(part));
    }
    parts
}

/// One stage, all ranks.
fn two_levels(runs: &Runs, received: &[Vec<PlacedRows>], topology: &Topology) -> Vec<TwoLevelPart> {
    let node = |rank: u32| topology.node(rank as usize);
    let mut parts = vec![TwoLevelPart::default(); received.len()];
    sweep(runs, received, |owner, piece, receivers| {
        let mut gateways = Vec::new();
        // Receivers ascend, so those of one node stand together.
        for group in receivers.ranks.chunk_by(|&a, &b| node(a) == node(b)) {
            let ranks = group.to_vec();
            if node(group[0]) == node(owner.rank) {
                let split = OwnedSplit { rows: owner.local(&piece), ranks };
                parts[owner.rank as usize].near.owned.push(split);
                for &rank in group {
                    let split = RemoteSplit { rows: receivers.rows(rank, &piece), rank: owner.rank };
                    parts[rank as usize].near.remote.push(split);
                }
                continue;
            }
            // A rank that needs the rows anyway, so that forwarding adds no copy inside the node; of these the one that has
            // taken in the least so far, and the first of equals.
            let gateway = group.iter().copied().min_by_key(|&rank| parts[rank as usize].inter_rows);
            let gateway = gateway.unwrap_or(group[0]);
            gateways.push(gateway);
            let part = &mut parts[gateway as usize];
            let rows = Range::new(part.inter_rows, part.inter_rows + piece.len());
            part.inter.remote.push(RemoteSplit { rows, rank: owner.rank });
            part.inter_rows = rows.end;
            part.forward.owned.push(OwnedSplit { rows, ranks });
            for &rank in group {
                let split = RemoteSplit { rows: receivers.rows(rank, &piece), rank: gateway };
                parts[rank as usize].forward.remote.push(split);
            }
        }
        if !gateways.is_empty() {
            let split = OwnedSplit { rows: owner.local(&piece), ranks: gateways };
            parts[owner.rank as usize].inter.owned.push(split);
        }
    });
    parts
}
