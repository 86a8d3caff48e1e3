//! What a device cannot do.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What a device, or what starts it, cannot do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum DeviceFault {
    /// A call of a driver, a library or a compiler failed.
    #[error("{words}")]
    Call {
        /// The call, its code and the library's own words.
        words: String,
    },
    /// A wait inside a kernel gave up.
    #[error("{evidence}")]
    Wait {
        /// Who waited, and for what.
        evidence: String,
    },
    /// What is started by another library takes too long.
    #[error("it has not started within {:.3} s", limit.as_secs_f64())]
    NotStarted {
        /// The limit.
        limit: Duration,
    },
    /// What is started by another library runs already.
    #[error("it has been started already")]
    StartedAlready,
    /// A launcher counts its ranks in another way, or lends a library that is not for threads.
    #[error("it gives rank {rank} of {ranks} and {threading}")]
    OtherRank {
        /// The rank that it gives.
        rank: usize,
        /// The ranks that it counts.
        ranks: usize,
        /// What threads may do.
        threading: String,
    },
    /// A machine without ranks.
    #[error("it has no rank")]
    NoRank,
    /// Tables that are not those of the Program.
    #[error("the tables of its Program have nothing for it")]
    NoTables,
    /// CPU ranks do not capture.
    #[error("CPU ranks have no graphs")]
    NoGraphs,
    /// Ranks that share a process are captured.
    #[error(
        "a group of {ranks} ranks in one process cannot be captured: they synchronise on the host in every call. Call it outside of the \
         graph, or give each rank a process and a GPU of its own"
    )]
    CaptureOfShared {
        /// Ranks of the process.
        ranks: usize,
    },
    /// A plan is captured before its first call.
    #[error(
        "a plan that was never called cannot be called first inside of a graph, because making it ready is no work \
         for a graph. Call it once before, or give it to Group.prefetch"
    )]
    CaptureBeforeCall,
    /// Rows between ranks are captured before their first call.
    #[error(
        "rows that travel between ranks for the first time are no work for a graph: move rows of these shapes, types and \
         splits once before the capture"
    )]
    CaptureBeforeRows,
    /// A graph is to run a plan of other operations.
    #[error(
        "the plan that was captured has the operations {}, and the new one {}; plans of one graph need as many stages",
        .captured.join(", "),
        .new.join(", ")
    )]
    OtherOperations {
        /// Operations of the plan that was captured.
        captured: Vec<String>,
        /// Those of the new one.
        new: Vec<String>,
    },
}

impl DeviceFault {
    /// A call that failed, in the words of its error.
    pub fn call(error: impl ToString) -> Self {
        Self::Call { words: error.to_string() }
    }
}
