use serde::{Deserialize, Serialize};

use crate::{CostModel, DispatchAlgorithm, PlanError, Topology};

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
    /// Rows of a chunk; `None` picks one from the length and the number of ranks, see [`PlanConfig::chunk_size_for`].
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

/// The largest number of ranks.
pub const MAX_CP_SIZE: usize = 4096;

/// The largest number of remote stages that can be asked for.
pub const MAX_STAGES: usize = 64;

impl PlanConfig {
    /// Everything automatic on `world_size` ranks of one node.
    pub const fn new(world_size: usize) -> Self {
        Self {
            chunk_size: None,
            dispatch: DispatchAlgorithm::Affinity,
            stages: StageCount::Auto,
            topology: Topology::flat(world_size),
            cost: CostModel::H200,
        }
    }

    /// Rows of a chunk of a sequence of `seqlen` rows: what was asked for; else the power of two in `[64, 2048]` that gives
    /// every rank at least 16 chunks where the length allows, so that there is something to balance.
    pub fn chunk_size_for(&self, seqlen: usize) -> usize {
        self.chunk_size.unwrap_or_else(|| {
            let most = seqlen / (16 * self.topology.world_size.max(1));
            most.checked_ilog2().map_or(64, |log| (1_usize << log).clamp(64, 2048))
        })
    }

    /// Whether a plan can be made with it. Planning itself cannot fail.
    ///
    /// # Errors
    /// A chunk size of 0, a number of ranks or of stages out of range, nodes that hold no rank, a cost model with which
    /// no time can be predicted.
    pub fn validate(&self) -> Result<(), PlanError> {
        if self.chunk_size == Some(0) {
            return Err(PlanError::ZeroChunkSize);
        }
        let Topology { world_size, ranks_per_node } = self.topology;
        if world_size == 0 || world_size > MAX_CP_SIZE {
            return Err(PlanError::CpSize { cp_size: world_size, max: MAX_CP_SIZE });
        }
        if ranks_per_node == 0 || ranks_per_node > world_size {
            return Err(PlanError::RanksPerNode { ranks_per_node, world_size });
        }
        if let StageCount::Fixed(stages) = self.stages
            && (stages == 0 || stages > MAX_STAGES)
        {
            return Err(PlanError::Stages { stages, max: MAX_STAGES });
        }
        self.cost.validate()
    }
}
