//! Rows through the links of one rank in one collective, inside its node and between nodes.

use counterpoint_cost::CostModel;
use counterpoint_plan::{GroupPart, Runs, StageCuts, Topology};

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

/// [`busier_rows`] of every rank in the group-cast of a stage of `cuts` but stage 0, whose keys belong to the owners of `runs`.
pub(crate) fn busier_rows_of_all(
    cuts: &StageCuts,
    stage: usize,
    runs: &Runs,
    ranks: usize,
    topology: &Topology,
) -> Vec<LinkRows> {
    // What each sends and receives.
    let mut moved = vec![[LinkRows::default(); 2]; ranks];
    cuts.pieces(runs, stage, |owner, receivers, rows| {
        let owner = owner as usize;
        for receiver in receivers.iter().map(|&rank| rank as usize).filter(|&rank| rank != owner) {
            let is_near = topology.node(owner) == topology.node(receiver);
            for (rank, side) in [(owner, 0), (receiver, 1)] {
                let moved = &mut moved[rank][side];
                *(if is_near { &mut moved.near } else { &mut moved.far }) += rows as u64;
            }
        }
    });
    moved.into_iter().map(|[sent, received]| LinkRows::busier(sent, received)).collect()
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask};
    use counterpoint_plan::{Dispatch, Division, Owners, Planning, RankOutline};

    use super::*;

    /// What is counted piece by piece is what the parts of all ranks have, inside nodes and between them.
    #[test]
    fn rows_of_all_ranks_are_those_of_their_parts() {
        const RANKS: usize = 4;
        for (ranks_per_node, stride) in [(4, 1), (2, 1), (2, 3)] {
            let documents = Documents::from_lengths([700, 90, 1200, 58]).unwrap();
            let mask = Mask::causal(documents).unwrap();
            let mut chunks = vec![Vec::new(); RANKS];
            (0..32_u32).for_each(|chunk| chunks[(chunk as usize * stride) % RANKS].push(chunk));
            let dispatch = Dispatch::new(2048, 64, chunks);
            let topology = Topology { world_size: RANKS, ranks_per_node };
            let division = Division::new(&mask, Owners::new(dispatch.clone(), dispatch));
            let layers = |_: &[Vec<counterpoint_mask::Band>], _: &[usize]| 2;
            let (owners, ranks) = RankOutline::of(division, &topology, layers, &Planning::ALONE).unwrap();
            let cuts = StageCuts::gathered(&ranks);
            let parts = cuts.parts(owners.k_runs(), 1);
            let wanted: Vec<LinkRows> =
                (0..RANKS).map(|rank| busier_rows(&parts[rank], rank, &topology)).collect();
            assert!(wanted.iter().any(|rows| rows.near > 0));
            assert_eq!(wanted.iter().any(|rows| rows.far > 0), ranks_per_node < RANKS);
            assert_eq!(busier_rows_of_all(&cuts, 1, owners.k_runs(), RANKS, &topology), wanted);
        }
    }
}
