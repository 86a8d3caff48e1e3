//! Rows through the links of one rank in one collective, inside its node and between nodes.

use counterpoint_cost::CostModel;
use counterpoint_plan::{GroupPart, Topology};

/// Key rows that one rank sends or receives in one collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkRows {
    /// Inside the node.
    pub(crate) near: u64,
    /// Between nodes.
    pub(crate) far: u64,
}

impl LinkRows {
    /// Sent and received at the same time: what takes time is the larger of the two on each link.
    pub(crate) fn busier(sent: Self, received: Self) -> Self {
        Self { near: sent.near.max(received.near), far: sent.far.max(received.far) }
    }

    /// Links inside the node and the network work side by side.
    pub(crate) fn seconds(self, row_bytes: usize, cost: &CostModel) -> f64 {
        let row_bytes = row_bytes as u64;
        f64::max(cost.link.seconds(self.near * row_bytes), cost.network.seconds(self.far * row_bytes))
    }
}

/// Rows of the busier direction of a rank's links in one collective.
pub(crate) fn busier_rows(part: &GroupPart, rank: usize, topology: &Topology) -> LinkRows {
    let node = topology.node(rank);
    let count = |rows: &mut LinkRows, other: u32, length: usize| {
        if other as usize == rank {
            return;
        }
        let side = if topology.node(other as usize) == node { &mut rows.near } else { &mut rows.far };
        *side += length as u64;
    };
    let (mut sent, mut received) = (LinkRows::default(), LinkRows::default());
    for split in &part.owned {
        split.ranks.iter().for_each(|&other| count(&mut sent, other, split.rows.len()));
    }
    part.remote.iter().for_each(|split| count(&mut received, split.rank, split.rows.len()));
    LinkRows::busier(sent, received)
}
