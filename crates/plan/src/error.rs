//! What is refused of a plan: chunk sizes, ranks, stages, cost models, layers, memory.

use counterpoint_cost::CostError;
use thiserror::Error;

/// Why a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// `chunk_size` is 0.
    #[error("chunk_size is 0; it must be at least 1 row")]
    ZeroChunkSize,
    /// `chunk_size` cuts a sequence into too many chunks.
    #[error(
        "chunk_size {chunk_size} cuts {seqlen} rows into {chunks} chunks; at most {max} are supported, so give a \
         chunk_size of at least {least}, or none to have one picked"
    )]
    TooManyChunks {
        /// Rows of the longer sequence.
        seqlen: usize,
        /// What was asked.
        chunk_size: usize,
        /// Chunks that it makes.
        chunks: usize,
        /// The largest number that is supported.
        max: usize,
        /// The smallest chunk size that works.
        least: usize,
    },
    /// `cp_size` is out of range.
    #[error("cp_size is {cp_size}; it must be between 1 and {max}")]
    CpSize {
        /// What was asked.
        cp_size: usize,
        /// The largest that is supported.
        max: usize,
    },
    /// A node holds no rank, or more ranks than there are.
    #[error(
        "ranks_per_node is {ranks_per_node} with {world_size} ranks in all; it must be between 1 and {world_size}"
    )]
    RanksPerNode {
        /// What was asked.
        ranks_per_node: usize,
        /// All ranks.
        world_size: usize,
    },
    /// A fixed number of stages that is out of range.
    #[error("the number of stages is {stages}; it must be between 0 and {max}, or chosen automatically")]
    Stages {
        /// What was asked.
        stages: usize,
        /// The largest that is supported.
        max: usize,
    },
    /// No number of stages.
    #[error(
        "`{text}` is not a number of stages; give auto or a number from 0 to {max}, for both passes or as forward=N,backward=N"
    )]
    StagesText {
        /// What was given.
        text: String,
        /// The largest number.
        max: usize,
    },
    /// A figure of the cost model with which no time can be predicted.
    #[error(transparent)]
    Cost(CostError),
    /// A linear layer cannot be split so.
    #[error("{field} is {value}; a tensor-parallel linear layer wants {wanted}")]
    Linear {
        /// Which figure.
        field: &'static str,
        /// What was given.
        value: usize,
        /// What it must be.
        wanted: String,
    },
    /// All ranks' pieces would take more memory than there is.
    #[error(
        "the pieces of {ranks} ranks take about {needed} bytes, but only {available} are available; plan fewer ranks, larger chunks, \
         or one rank alone"
    )]
    Memory {
        /// Number of ranks.
        ranks: usize,
        /// Bytes, estimated.
        needed: u64,
        /// Bytes.
        available: u64,
    },
    /// Whoever wanted the plan does not want it any more.
    #[error("planning was cancelled")]
    Cancelled,
    /// There is no such rank.
    #[error("rank {rank} does not exist; the plan is for {cp_size} ranks, counted from 0")]
    Rank {
        /// What was asked.
        rank: usize,
        /// Number of ranks.
        cp_size: usize,
    },
    /// A second mask on a dispatch whose length is not the mask's.
    #[error(
        "the mask has {mask} {axis} rows, but the plan's dispatch holds {plan}; plan this mask on its own"
    )]
    OtherLength {
        /// `q` or `k`.
        axis: &'static str,
        /// Rows of the mask.
        mask: usize,
        /// Rows of the dispatch.
        plan: usize,
    },
    /// A second mask on a dispatch for another number of ranks.
    #[error(
        "the configuration asks for {config} ranks, but the plan's dispatch is for {plan}; ask for {plan}"
    )]
    OtherWorldSize {
        /// Ranks of the configuration.
        config: usize,
        /// Ranks of the dispatch.
        plan: usize,
    },
}
