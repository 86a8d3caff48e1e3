//! What is refused of a plan: layers that do not split, memory, ranks, masks of other lengths.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A linear layer cannot be split so.
    #[error("{field} is {value}; a tensor-parallel linear layer wants {wanted}")]
    Linear {
        /// Which figure.
        field: Cow<'static, str>,
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
        axis: Cow<'static, str>,
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
