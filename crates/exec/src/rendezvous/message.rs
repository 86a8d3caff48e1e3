//! What ranks and the store on rank 0 say to each other.

use serde::{Deserialize, Serialize};

use super::Facet;
use crate::{ExecError, RankActivity, SeatFault};

/// The first thing that a rank says once it has proved that it is of the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: usize,
    /// What all ranks must have alike, the number of ranks among it.
    pub(super) facets: Vec<Facet>,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Welcome {
    /// The rank is in. What connections between ranks of this job, and of no other with its token, are known by.
    Joined { session: String },
    /// There is no seat for it: another process has it, or the job was started with something else.
    NoSeat { reason: SeatFault },
    /// The job has failed.
    Refused { error: ExecError },
}

/// What a rank asks. Answers carry the question's `id`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Request {
    /// The payload under this key, from now on.
    Set { key: String },
    /// The value of a key, once there is one.
    Get { id: u64, key: String, keep: Keep },
    /// The value of a key, if there is one now.
    Find { id: u64, key: String },
    /// Adds to a counter.
    Add { id: u64, key: String, by: i64 },
    /// The payloads of all ranks, once all have come.
    Gather { id: u64, place: String },
    /// Which ranks have not come to a gathering.
    Missing { id: u64, place: String },
    /// An error that ends the job.
    Fail { error: ExecError },
    /// What a rank is doing.
    Ask { id: u64, rank: usize },
    /// The answer to [`Reply::Describe`].
    Activity { asker: usize, id: u64, activity: RankActivity },
    /// The rank needs nothing more.
    Leave,
}

/// Whether a value stays after it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Keep {
    Yes,
    No,
}

/// What the store says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The payload.
    Value {
        id: u64,
    },
    /// There is no value.
    Unset {
        id: u64,
    },
    Count {
        id: u64,
        value: i64,
    },
    /// The payload holds every rank's, one after the other.
    Gathered {
        id: u64,
        lengths: Vec<usize>,
    },
    Missing {
        id: u64,
        ranks: Vec<usize>,
    },
    Activity {
        id: u64,
        activity: RankActivity,
    },
    /// A gathering to which this rank, which has left, never comes.
    Left {
        id: u64,
        rank: usize,
    },
    /// Not an answer: say what this rank is doing.
    Describe {
        asker: usize,
        id: u64,
    },
    /// Not an answer: the job has failed, with an error of `rank`.
    Failed {
        rank: usize,
        error: ExecError,
    },
    /// Not an answer: the job has failed because a rank's process is gone.
    Lost {
        rank: usize,
    },
}
