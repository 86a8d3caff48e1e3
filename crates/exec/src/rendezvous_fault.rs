//! What is wrong with a launcher's variables, with a process that asks for a seat, and with connections between ranks.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What is wrong with a launcher's variable, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum VariableFault {
    /// It is not a number.
    #[error("is `{value}`, which is not a whole number")]
    NotANumber {
        /// Its value.
        value: String,
    },
    /// It counts no ranks.
    #[error("is 0; there is at least one rank")]
    NoRanks,
    /// It is not one of the ranks.
    #[error("is {rank}, but {counter} is {world_size}; ranks count from 0")]
    RankBeyond {
        /// Its value.
        rank: usize,
        /// The variable that counts the ranks.
        counter: String,
        /// The value of that one.
        world_size: usize,
    },
    /// It is not set, and the other of its pair is.
    #[error("is not set, but {set} is; set both, or neither")]
    SetAlone {
        /// The other.
        set: String,
    },
    /// Nothing says where rank 0 is.
    #[error(
        "is not set, and {launcher} does not say where rank 0 is; set MASTER_ADDR and MASTER_PORT, or {address}"
    )]
    NoPlace {
        /// The variable that would say it for every launcher.
        address: String,
        /// The launcher, which could have said it.
        launcher: String,
    },
    /// It is not an address.
    #[error("is `{value}`, which is not host:port, such as node1:29600")]
    NotAnAddress {
        /// Its value.
        value: String,
    },
    /// It is not a port.
    #[error("is not a port; give one from 1 to 65535")]
    NotAPort,
    /// It is easily guessed.
    #[error(
        "is too short; give at least {least} random characters, such as what `openssl rand -hex 32` prints"
    )]
    ShortSecret {
        /// Characters that it must have.
        least: usize,
    },
    /// Ranks of several hosts have no secret.
    #[error(
        "is not set, and {because}; ranks of several hosts know each other by a secret: set it to the same {least} or more random characters \
         on all of them, such as what `openssl rand -hex 32` prints"
    )]
    NoSecret {
        /// Characters that it must have.
        least: usize,
        /// What says that there are several.
        because: SeveralHosts,
    },
}

/// What says that ranks are on several hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum SeveralHosts {
    /// The launcher.
    #[error("{launcher} started ranks on several hosts")]
    Launcher {
        /// Its name.
        launcher: String,
    },
    /// The address of rank 0.
    #[error("rank 0 is on another host ({host})")]
    FirstElsewhere {
        /// That host.
        host: String,
    },
}

/// Why the job at a rendezvous has no seat for a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum SeatFault {
    /// Another process has the name under which rank 0 of this host is found.
    #[error("{} is its rank 0", process.map_or_else(|| "a process of another user".to_owned(), |id| format!("process {id}")))]
    OtherHost {
        /// Its id, where it is of this user.
        process: Option<i32>,
    },
    /// It has fewer ranks.
    #[error("it has {world_size} ranks, counted from 0, and none of number {rank}")]
    NoSuchRank {
        /// Ranks of the job.
        world_size: usize,
        /// The rank that asks.
        rank: usize,
    },
    /// The seat is another process's.
    #[error("its rank {rank} is there already")]
    Taken {
        /// The rank.
        rank: usize,
    },
    /// It was started with something else.
    #[error("its {what} is {value}, this process's {own}")]
    StartedWith {
        /// What differs.
        what: String,
        /// The job's.
        value: String,
        /// That of the process that asks.
        own: String,
    },
}

/// What a rank found where rank 0 should listen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum SeekFault {
    /// There was no address to try.
    #[default]
    #[error("")]
    NoAddress,
    /// The host's name is unknown.
    #[error("{host} cannot be looked up: {text}")]
    UnknownHost {
        /// The name.
        host: String,
        /// The system's words.
        text: String,
    },
    /// No process of this user has begun as rank 0.
    #[error("no process of this user is rank 0 there: connection refused")]
    NoProcess,
    /// A call of the system failed.
    #[error("{text}")]
    System {
        /// The system's words.
        text: String,
    },
    /// Another program listens.
    #[error("{address}: what listens there is not counterpoint")]
    AnotherKind {
        /// Where.
        address: SocketAddr,
    },
    /// Another job listens.
    #[error("{address}: what listens there does not have this job's secret")]
    AnotherSecret {
        /// Where.
        address: SocketAddr,
    },
    /// Rank 0 listened and closed the connection without an answer.
    #[error("{address} closed the connection")]
    Closed {
        /// Where.
        address: SocketAddr,
    },
    /// The connection broke, or what came is not whole.
    #[error("{address}: {text}")]
    Broken {
        /// Where.
        address: SocketAddr,
        /// The system's words.
        text: String,
    },
    /// A stranger listened, and has left since.
    #[error("{stranger}, and later: {last}")]
    StrangerBefore {
        /// What listened.
        stranger: Box<SeekFault>,
        /// What the last attempt found.
        last: Box<SeekFault>,
    },
}

impl SeekFault {
    /// A call of the system that failed, in its own words.
    pub(crate) fn system(error: &std::io::Error) -> Self {
        Self::System { text: error.to_string() }
    }
}

/// How a rank lost touch with rank 0, or with what rank 0 keeps for the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum StoreFault {
    /// Rank 0 reads nothing.
    #[error("it takes nothing; has its process stopped?")]
    TakesNothing,
    /// Rank 0 says nothing.
    #[error("it does not answer")]
    NoAnswer,
    /// The connection failed.
    #[error("{text}")]
    System {
        /// The system's words.
        text: String,
    },
    /// A value cannot be written or read.
    #[error("{text}")]
    Value {
        /// The words of what writes or reads it.
        text: String,
    },
    /// A rank's time of start is not whole.
    #[error("what a rank sent of its start is not whole")]
    PartOfStart,
    /// A rank's results are not whole.
    #[error("its results are not whole")]
    PartOfResults,
    /// A transport without a rank.
    #[error("it has no end")]
    NoEnd,
    /// A store that a program lends fails.
    #[error("the store of its process group: {text}")]
    Lent {
        /// Its own words.
        text: String,
    },
    /// The lender of a store no longer waits for its answers.
    #[error("this rank waits no longer")]
    GivenUp,
    /// The interpreter that runs a lent store ends.
    #[error("the program ends")]
    ProgramEnds,
}

/// How a connection between two ranks broke.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum ConnectionFault {
    /// Its other end is gone.
    #[error("it closed the connection")]
    Closed,
    /// Its other end reads nothing.
    #[error("it took nothing for {:.3} s", limit.as_secs_f64())]
    TookNothing {
        /// For so long.
        limit: Duration,
    },
    /// MPI is finalised.
    #[error("MPI has ended")]
    MpiEnded,
    /// Rows that are not those that were announced.
    #[error("{bytes} bytes of rows are not what its part in {place} announces")]
    RowBytes {
        /// Bytes that came.
        bytes: usize,
        /// The collective.
        place: String,
    },
    /// A call of the system or of MPI failed.
    #[error("{text}")]
    System {
        /// The words of either.
        text: String,
    },
}

impl ConnectionFault {
    /// A call of the system that failed, in its own words.
    pub(crate) fn system(error: impl ToString) -> Self {
        Self::System { text: error.to_string() }
    }
}

impl StoreFault {
    /// A value that cannot be written or read, in the words of what does.
    pub fn value(error: impl ToString) -> Self {
        Self::Value { text: error.to_string() }
    }
}
