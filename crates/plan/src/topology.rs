//! Which ranks share a node.

use serde::{Deserialize, Serialize};

/// Ranks in nodes: rank `r` lives on node `r / ranks_per_node`. The last node may hold fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Topology {
    /// All ranks.
    pub world_size: usize,
    /// Ranks of one node; `world_size` when there is only one node.
    pub ranks_per_node: usize,
}

impl Topology {
    /// One node.
    pub const fn flat(world_size: usize) -> Self {
        Self { world_size, ranks_per_node: world_size }
    }

    /// The node of `rank`.
    pub const fn node(&self, rank: usize) -> usize {
        rank / self.ranks_per_node
    }

    /// Number of nodes.
    pub const fn nodes(&self) -> usize {
        self.world_size.div_ceil(self.ranks_per_node)
    }
}
