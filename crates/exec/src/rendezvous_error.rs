//! Why ranks that are processes do not come together.

use std::fmt::Write;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{ConnectionFault, SeatFault, SeekFault, StoreFault, VariableFault};

/// Why ranks that are processes do not come together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// A launcher's variable is missing or makes no sense.
    #[error("{variable} {reason}")]
    Variable {
        /// Its name.
        variable: String,
        /// What is wrong and what to do.
        reason: VariableFault,
    },
    /// Rank 0 can listen nowhere.
    #[error(
        "rank 0 cannot listen at {address} for the other ranks: {text}; free the port, or set {variable} to host:port"
    )]
    Listen {
        /// Host and ports that were tried.
        address: String,
        /// The system's words.
        text: String,
        /// The variable that names another address.
        variable: String,
    },
    /// Rank 0 is not where it should be.
    #[error("rank {rank} did not reach rank 0 at {address} within {:.3} s: {reason}; is rank 0 running?", waited.as_secs_f64())]
    Unreachable {
        /// The rank that tried.
        rank: usize,
        /// Host and ports that were tried.
        address: String,
        /// How long.
        waited: Duration,
        /// What the last attempt found, and what listened there instead.
        reason: Box<SeekFault>,
    },
    /// Rank 0 does not let a process in that speaks another version of its protocol.
    #[error(
        "rank {rank} was turned away: rank 0 speaks version {theirs} of the protocol and this process version {own}; install one version \
         everywhere"
    )]
    OtherVersion {
        /// What the process called itself.
        rank: usize,
        /// Its version.
        own: u32,
        /// That of rank 0.
        theirs: u32,
    },
    /// Another job has the same rendezvous.
    #[error("rank {rank} found another job at {address}: {reason}; give each job a MASTER_PORT of its own")]
    AnotherJob {
        /// The rank that found it.
        rank: usize,
        /// Where.
        address: String,
        /// What shows it.
        reason: SeatFault,
    },
    /// A process has no file descriptors left for connections.
    #[error(
        "rank {rank} has no file descriptors left for the connections of {world_size} ranks{}; raise the limit with \
         `ulimit -n`",
        most(limit)
    )]
    Descriptors {
        /// The rank whose process it is.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
        /// How many descriptors it may have.
        limit: Option<u64>,
    },
    /// A rank's process does not read.
    #[error("rank {rank} took nothing of what was sent to it for {:.3} s; has its process stopped?", waited.as_secs_f64())]
    Unresponsive {
        /// The rank.
        rank: usize,
        /// For how long.
        waited: Duration,
    },
    /// Ranks that were waited for did not come.
    #[error(
        "rank {rank} waited {:.3} s at {place} for {}, which never came; are all {world_size} processes running?",
        waited.as_secs_f64(),
        list_ranks(missing)
    )]
    Absent {
        /// The rank that waited.
        rank: usize,
        /// The rendezvous.
        place: String,
        /// How long it waited.
        waited: Duration,
        /// Who did not come.
        missing: Vec<usize>,
        /// How many there are to be.
        world_size: usize,
    },
    /// Ranks did not take part in an attempt of all to join.
    #[error(
        "rank {rank} waited {:.3} s for {}, which never joined the group; all {world_size} ranks must make it",
        waited.as_secs_f64(),
        list_ranks(missing)
    )]
    NotJoined {
        /// The rank that waited.
        rank: usize,
        /// How long it waited.
        waited: Duration,
        /// Who did not take part.
        missing: Vec<usize>,
        /// How many there are to be.
        world_size: usize,
    },
    /// Nobody gave what was asked for.
    #[error("rank {rank} waited {:.3} s for `{key}`, which {}", waited.as_secs_f64(), not_set_by(*setter))]
    Unset {
        /// The rank that asked.
        rank: usize,
        /// What for.
        key: String,
        /// Who is to set it, where that is known.
        setter: Option<usize>,
        /// How long.
        waited: Duration,
    },
    /// A rank's process is gone.
    #[error("rank {lost} is gone: its connection closed without a farewell; rank {rank} meanwhile: {doing}")]
    Lost {
        /// Who is gone.
        lost: usize,
        /// Who says so.
        rank: usize,
        /// What that rank was doing.
        doing: String,
    },
    /// A connection between two ranks broke.
    #[error("rank {rank} lost its connection to rank {peer}: {reason}; rank {rank} meanwhile: {doing}")]
    Connection {
        /// Who says so.
        rank: usize,
        /// Who is at its other end.
        peer: usize,
        /// How.
        reason: ConnectionFault,
        /// What the first was doing.
        doing: String,
    },
    /// A rank ended with an error of its own.
    #[error("rank {rank} failed: {error}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The sentence of its error.
        error: String,
    },
    /// Ranks were not given the same.
    #[error(
        "the ranks disagree: {what} is {}; start all of them with the same program and arguments",
        groups(values)
    )]
    Disagreement {
        /// On what.
        what: String,
        /// Every value with the ranks that have it.
        values: Vec<(String, Vec<usize>)>,
    },
    /// Rank 0 said something that this program does not understand.
    #[error("rank {rank} lost touch with rank 0: {reason}")]
    Broken {
        /// The rank.
        rank: usize,
        /// What went wrong.
        reason: StoreFault,
    },
}

/// `rank 3`, or `ranks 1, 2 and 5`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [rank] => format!("rank {rank}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(ToString::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
    }
}

fn not_set_by(setter: Option<usize>) -> String {
    setter.map_or_else(|| "no rank has set".to_owned(), |setter| format!("rank {setter} has not set"))
}

fn most(limit: &Option<u64>) -> String {
    limit.map_or_else(String::new, |limit| format!(", which are at most {limit}"))
}

fn groups(values: &[(String, Vec<usize>)]) -> String {
    let mut text = String::new();
    for (index, (value, ranks)) in values.iter().enumerate() {
        let between = match index {
            0 => "",
            _ if index + 1 == values.len() => " and ",
            _ => ", ",
        };
        let _ = write!(text, "{between}{value} on {}", list_ranks(ranks));
    }
    text
}
