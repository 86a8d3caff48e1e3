//! Why a routing of tokens to experts cannot be.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a routing makes no sense, or does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// There are no ranks or no experts, or some ranks would have more experts than others.
    #[error(
        "{experts} experts on {ranks} ranks; each rank needs the same number of experts, and at least one"
    )]
    Experts {
        /// Experts of all ranks.
        experts: usize,
        /// Ranks.
        ranks: usize,
    },
    /// More experts than anybody means.
    #[error("there are {experts} experts; give {most} at most")]
    TooMany {
        /// Experts of all ranks.
        experts: usize,
        /// The most.
        most: usize,
    },
    /// More rows than anybody means.
    #[error("rank {rank} has {rows} rows; give {most} at most")]
    TooManyRows {
        /// The rank.
        rank: usize,
        /// Its rows.
        rows: usize,
        /// The most.
        most: usize,
    },
    /// An expert that does not exist.
    #[error("token {token} of rank {rank} goes to expert {expert}; there are experts 0 to {last}", last = experts - 1)]
    UnknownExpert {
        /// The rank that has the token.
        rank: usize,
        /// The token, counted from the rank's first.
        token: usize,
        /// The expert.
        expert: u32,
        /// Experts of all ranks.
        experts: usize,
    },
    /// An expert twice.
    #[error("token {token} of rank {rank} goes to expert {expert} twice; name each expert of a token once")]
    Twice {
        /// The rank that has the token.
        rank: usize,
        /// The token, counted from the rank's first.
        token: usize,
        /// The expert.
        expert: u32,
    },
    /// Experts of tokens that are no rows of `choices`.
    #[error("rank {rank} names {given} experts, which are no rows of {choices} experts a token")]
    Uneven {
        /// The rank.
        rank: usize,
        /// Experts named.
        given: usize,
        /// Experts of a token.
        choices: usize,
    },
    /// Counts for another number of experts.
    #[error("rank {rank} has counts of {given} experts; there are {experts}")]
    CountsOfOthers {
        /// The rank.
        rank: usize,
        /// Counts given.
        given: usize,
        /// Experts of all ranks.
        experts: usize,
    },
    /// Counts of another number of rows.
    #[error("the counts of rank {rank} add up to {sum} rows, and it has {rows}")]
    CountsDoNotAddUp {
        /// The rank.
        rank: usize,
        /// Their sum.
        sum: usize,
        /// Rows that it has.
        rows: usize,
    },
    /// More tokens than a rank was prepared for.
    #[error("rank {rank} has {tokens} tokens, and its capacity is {capacity}")]
    Tokens {
        /// The rank.
        rank: usize,
        /// Tokens of it.
        tokens: usize,
        /// The most that were planned.
        capacity: usize,
    },
    /// More rows than an expert takes.
    #[error(
        "expert {expert} is given {rows} rows, and its capacity is {capacity}; drop some (`Routing::within`) or plan more"
    )]
    Overfull {
        /// The expert.
        expert: usize,
        /// Rows routed to it.
        rows: usize,
        /// The most that it takes.
        capacity: usize,
    },
    /// More rows than a rank's experts take together.
    #[error("the experts of rank {rank} are given {rows} rows, and its capacity is {capacity}; plan more")]
    RankOverfull {
        /// The rank.
        rank: usize,
        /// Rows routed to its experts.
        rows: usize,
        /// The most that they take.
        capacity: usize,
    },
}
