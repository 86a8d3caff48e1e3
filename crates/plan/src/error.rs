//! What is refused of a plan: layers that do not split, memory, ranks, masks of other lengths.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A figure of a tensor-parallel linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LinearField {
    /// Ranks that share the layer.
    TpSize,
    /// Its tokens.
    Tokens,
    /// Features of its input.
    InFeatures,
    /// Features of its output.
    OutFeatures,
    /// Its groups of tokens or of columns.
    Groups,
    /// The sizes of its groups of tokens, added up.
    SumOfGroups,
    /// The sizes of its groups of columns, added up.
    SumOfColumnGroups,
}

impl fmt::Display for LinearField {
    /// As callers name it, where they do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::TpSize => "tp_size",
            Self::Tokens => "tokens",
            Self::InFeatures => "in_features",
            Self::OutFeatures => "out_features",
            Self::Groups => "groups",
            Self::SumOfGroups => "the sum of groups",
            Self::SumOfColumnGroups => "the sum of column groups",
        })
    }
}

/// What a figure of a tensor-parallel linear layer must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum LinearBound {
    /// Not 0.
    #[error("at least 1")]
    AtLeastOne,
    /// Features that are split evenly.
    #[error("a multiple of the {ranks} ranks that share them")]
    MultipleOfRanks {
        /// Ranks of the layer.
        ranks: usize,
    },
    /// Groups of all columns.
    #[error("sizes of at least 1 that add up to the {columns} columns that travel")]
    AllColumns {
        /// Columns that travel.
        columns: usize,
    },
    /// Groups of all tokens.
    #[error("sizes of at least 1 that add up to the {tokens} tokens of a rank")]
    AllTokens {
        /// Tokens of the first rank.
        tokens: usize,
    },
    /// Not more than there are, and not 0.
    #[error("1 to {most}")]
    UpTo {
        /// Tokens of the layer that is planned.
        most: usize,
    },
    /// Not more than a layer of changing tokens was made for.
    #[error("at most max_tokens, {max_tokens}")]
    MaxTokens {
        /// Its most.
        max_tokens: usize,
    },
    /// Ranks that share query heads evenly.
    #[error("a divisor of the {heads_q} query heads")]
    DividesHeads {
        /// Query heads of the model.
        heads_q: usize,
    },
}

/// Why a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A linear layer cannot be split so.
    #[error("{field} is {value}; a tensor-parallel linear layer wants {wanted}")]
    Linear {
        /// Which figure.
        field: LinearField,
        /// What was given.
        value: usize,
        /// What it must be.
        wanted: LinearBound,
    },
    /// Tensors of which nobody could count the bytes that travel.
    #[error(
        "the tensors of {ranks} ranks together may have more than {most} bytes, which cannot be planned; make them smaller"
    )]
    Bytes {
        /// Number of ranks.
        ranks: usize,
        /// Bytes at most.
        most: u64,
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
