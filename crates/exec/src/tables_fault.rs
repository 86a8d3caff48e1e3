//! Why step tables are not taken: damaged, or made for something else.

use counterpoint_plan::BytesFault;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why step tables are not taken. Nothing has been made ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum TablesFault {
    /// Bytes that this version has not made, or that are not as they were.
    #[error(transparent)]
    Bytes(#[from] BytesFault),
    /// Of another rank.
    #[error("they are of rank {theirs}; give each rank its own")]
    Rank {
        /// Whose they are.
        theirs: usize,
    },
    /// Of a rank that the plan does not have.
    #[error("the plan has {ranks} ranks, the first of which is 0")]
    NoRank {
        /// How many it has.
        ranks: usize,
    },
    /// Of other ranks than those that are here.
    #[error("they are of {}, and {here} are in this process; give each of these its own", ranks(.given))]
    Ranks {
        /// So many are given.
        given: usize,
        /// So many are wanted.
        here: usize,
    },
    /// For another device.
    #[error(
        "they are for {theirs}, and this rank is on {own}; make them by the description of the rank's group"
    )]
    Device {
        /// What they were made for.
        theirs: String,
        /// What they are wanted on.
        own: String,
    },
    /// Of another plan, spec or policy.
    #[error("they are of another plan: {what} is {theirs} there and {own} here")]
    Plan {
        /// The first property that differs.
        what: String,
        /// As the tables have it.
        theirs: String,
        /// As it is wanted.
        own: String,
    },
    /// Of a forward alone, where a backward is wanted too; or the other way round.
    #[error("they are of {}", of_passes(.theirs, .own))]
    Pass {
        /// Passes that they are of.
        theirs: usize,
        /// Passes that are wanted.
        own: usize,
    },
}

fn ranks(count: &usize) -> String {
    if *count == 1 { "1 rank".to_owned() } else { format!("{count} ranks") }
}

fn of_passes(theirs: &usize, own: &usize) -> &'static str {
    if theirs < own {
        "the forward alone, and its backward is wanted too"
    } else {
        "a forward and its backward, and the forward alone is wanted"
    }
}
