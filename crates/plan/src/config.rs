use serde::{Deserialize, Serialize};

use crate::{CostModel, DispatchAlgorithm, Topology};

/// How many stages the remote work is cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageCount {
    /// The number that minimises the predicted makespan.
    Auto,
    /// So many remote stages after stage 0 (the local work), on every rank; at least 1.
    Fixed(usize),
}

/// What a person chose.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanConfig {
    /// Rows of a chunk; `None` picks one from the length and the number of ranks.
    pub chunk_size: Option<usize>,
    /// Chunks to ranks.
    pub dispatch: DispatchAlgorithm,
    /// Number of stages.
    pub stages: StageCount,
    /// Ranks and nodes. `world_size` is the context-parallel size.
    pub topology: Topology,
    /// What work costs.
    pub cost: CostModel,
}
