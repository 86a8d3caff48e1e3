//! What a person chooses of a plan: chunk size, dispatch, stages, query exchange, ranks and costs, and their limits.

use counterpoint_cost::CostModel;
use counterpoint_mask::Mask;
use counterpoint_plan::Topology;
use serde::{Deserialize, Serialize};

use crate::error::ConfigError;
use crate::pass_stages::PassStages;

/// How chunks are given to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DispatchAlgorithm {
    /// Few key rows received, with areas within 1 % of the greedy's; of few chunks on up to 16 GPUs the predicted times are levelled
    /// instead, which may leave areas far apart. The default.
    #[default]
    Affinity,
    /// Heaviest chunk first, each to the lightest rank that still has room.
    MinHeap,
    /// Contiguous runs in order.
    Sequential,
    /// Chunk `i` and its mirror to the same rank.
    Zigzag,
}

/// Whether the work of query rows that see many keys of others may be done where these keys are: queries travel there, partial
/// results back, and the keys stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryExchange {
    /// Where it is predicted to end a forward and a backward sooner, and neither of them later. The prediction is that of
    /// [`StageCount::Auto`](crate::StageCount::Auto) whatever the stages, so that these decide nothing about who computes what.
    Auto,
    /// Where it moves fewer bytes in a forward and a backward together, whatever time that takes.
    FewestBytes,
    /// Keys and values travel, and nothing else.
    Never,
}

/// What a person chose. All of it serialises: what is planned is distinguished by it ([`Fingerprint`](counterpoint_plan::Fingerprint)).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanConfig {
    /// Rows of a chunk; `None` picks one from the length and the number of ranks, see [`PlanConfig::chunk_size_for`].
    pub chunk_size: Option<usize>,
    /// Chunks to ranks.
    pub dispatch: DispatchAlgorithm,
    /// Number of stages of each pass.
    pub stages: PassStages,
    /// Whether queries may travel.
    pub query_exchange: QueryExchange,
    /// Ranks and nodes. `world_size` is the context-parallel size.
    pub topology: Topology,
    /// What work costs.
    pub cost: CostModel,
}

/// The largest number of ranks.
pub const MAX_CP_SIZE: usize = 4096;

/// The largest number of chunks that queries or keys are cut into. A person who asks for more, with a chunk size of 1 on
/// millions of tokens, has slipped: planning would take minutes and gigabytes.
pub const MAX_CHUNKS: usize = 1 << 20;

/// Where the chunk size is picked there are at most so many chunks, or [`PICKED_CHUNKS_A_RANK`] for every rank, whichever
/// is more.
const PICKED_CHUNKS: usize = 1 << 16;

/// Many more chunks a rank balance no better and cost time.
const PICKED_CHUNKS_A_RANK: usize = 64;

impl PlanConfig {
    /// Everything automatic on `world_size` ranks of one node, and queries stay: what their travel brings is predicted too well
    /// on GPUs (docs/limits.md), so it is asked for.
    pub const fn new(world_size: usize) -> Self {
        Self {
            chunk_size: None,
            dispatch: DispatchAlgorithm::Affinity,
            stages: PassStages::AUTO,
            query_exchange: QueryExchange::Never,
            topology: Topology::flat(world_size),
            cost: CostModel::H200,
        }
    }

    /// Rows of a chunk of a sequence of `seqlen` rows: what was asked for; else a power of two.
    ///
    /// The power picked is the one in `[64, 2048]` that gives every rank at least 16 chunks where the length allows, so
    /// that there is something to balance. Where that would make more than 65,536 chunks and more than 64 for every rank,
    /// it is the smallest that does not: planning takes time and memory for every chunk.
    pub fn chunk_size_for(&self, seqlen: usize) -> usize {
        self.chunk_size.unwrap_or_else(|| {
            let ranks = self.topology.world_size.max(1);
            let balanced = seqlen / (16 * ranks);
            let balanced = balanced.checked_ilog2().map_or(64, |log| (1_usize << log).clamp(64, 2048));
            let most_chunks = PICKED_CHUNKS.max(PICKED_CHUNKS_A_RANK * ranks);
            balanced.max(seqlen.div_ceil(most_chunks).next_power_of_two())
        })
    }

    /// Without what is not looked at where another plan's dispatch is given ([`plan_mask_on`](crate::plan_mask_on)): the chunk size and the
    /// algorithm. What such plans are distinguished by.
    pub fn on_a_dispatch(&self) -> Self {
        Self { chunk_size: None, dispatch: DispatchAlgorithm::default(), ..*self }
    }

    /// Whether a plan of `mask` can be made with it. Planning itself cannot fail.
    ///
    /// # Errors
    /// As [`PlanConfig::validate`]; a chunk size that cuts `mask` into more than [`MAX_CHUNKS`] chunks.
    pub fn validate_for(&self, mask: &Mask) -> Result<(), ConfigError> {
        self.validate()?;
        let (seqlen_q, seqlen_k) = (mask.seqlen_q(), mask.seqlen_k());
        // The same chunk size cuts both, so what suits the longer one suits both.
        let seqlen = seqlen_q.max(seqlen_k);
        let chunk_size = self.chunk_size_for(seqlen);
        let chunks = seqlen.div_ceil(chunk_size);
        if chunks > MAX_CHUNKS {
            let least = seqlen.div_ceil(MAX_CHUNKS);
            return Err(ConfigError::TooManyChunks { seqlen, chunk_size, chunks, max: MAX_CHUNKS, least });
        }
        Ok(())
    }

    /// Whether a plan of some mask can be made with it.
    ///
    /// # Errors
    /// A chunk size of 0, a number of ranks or of stages out of range, nodes that hold no rank, a cost model with which
    /// no time can be predicted.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.chunk_size == Some(0) {
            return Err(ConfigError::ZeroChunkSize);
        }
        let Topology { world_size, ranks_per_node } = self.topology;
        if world_size == 0 || world_size > MAX_CP_SIZE {
            return Err(ConfigError::CpSize { cp_size: world_size, max: MAX_CP_SIZE });
        }
        if ranks_per_node == 0 || ranks_per_node > world_size {
            return Err(ConfigError::RanksPerNode { ranks_per_node, world_size });
        }
        self.stages.validate()?;
        self.cost.validate().map_err(ConfigError::Cost)
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::MAX_SEQLEN;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The bounds of the documented rule, for any length and any number of ranks.
        #[test]
        fn a_picked_chunk_size_balances_and_bounds(
            seqlen in prop_oneof![1..=MAX_SEQLEN, 1..=(1_usize << 22)], ranks in 1..=MAX_CP_SIZE,
        ) {
            let size = PlanConfig::new(ranks).chunk_size_for(seqlen);
            let chunks = seqlen.div_ceil(size);
            prop_assert!(size.is_power_of_two() && size >= 64);
            prop_assert!(chunks <= (64 * ranks).max(1 << 16), "{} chunks of {}", chunks, size);
            prop_assert!(size == 64 || chunks >= 16 * ranks, "{} chunks of {}", chunks, size);
            if size > 2048 {
                prop_assert!(seqlen.div_ceil(size / 2) > (64 * ranks).max(1 << 16), "larger than it must be");
            }
        }
    }

    #[test]
    fn ordinary_lengths_keep_their_chunk_size() {
        let sizes = [
            (1 << 20, 8, 2048),
            (1 << 20, 64, 1024),
            (1 << 12, 4, 64),
            (1 << 22, 64, 2048),
            (1 << 27, 8, 2048),
            (1 << 30, 64, 1 << 14),
            (MAX_SEQLEN, 4096, 1 << 14),
        ];
        for (seqlen, ranks, size) in sizes {
            assert_eq!(PlanConfig::new(ranks).chunk_size_for(seqlen), size, "{seqlen} rows on {ranks} ranks");
        }
    }

    #[test]
    fn too_many_chunks_are_refused_with_the_least_size_that_works() {
        let config = |size| PlanConfig { chunk_size: Some(size), ..PlanConfig::new(4) };
        for (seqlen_q, seqlen_k) in [(MAX_CHUNKS * 3 + 1, 64), (64, MAX_CHUNKS * 3 + 1)] {
            let mask = Mask::cross_full(seqlen_q, seqlen_k).unwrap();
            let refused = config(3).validate_for(&mask).unwrap_err();
            assert_eq!(
                refused,
                ConfigError::TooManyChunks {
                    seqlen: MAX_CHUNKS * 3 + 1,
                    chunk_size: 3,
                    chunks: MAX_CHUNKS + 1,
                    max: MAX_CHUNKS,
                    least: 4,
                }
            );
            assert_eq!(config(4).validate_for(&mask), Ok(()));
        }
        let longest = Mask::full(MAX_SEQLEN).unwrap();
        assert_eq!(PlanConfig::new(1).validate_for(&longest), Ok(()));
        assert!(matches!(config(0).validate_for(&longest), Err(ConfigError::ZeroChunkSize)));
    }
}
