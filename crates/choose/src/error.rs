//! What is refused of a configuration, and why nothing could be chosen.

use counterpoint_cost::CostError;
use counterpoint_plan::PlanError;
use counterpoint_schedule::SimulateError;
use thiserror::Error;

/// Why no plan can be made with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
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
}

/// Why nothing could be chosen.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChooseError {
    /// The configuration does not make sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No plan can be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plan's Programs cannot be simulated; none is known.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}
