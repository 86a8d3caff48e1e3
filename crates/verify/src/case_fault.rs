//! Why a case of a check failed, or could not be run.

use std::io;

use counterpoint_cuda::{CudaError, TransportKind};
use counterpoint_exec::ExecError;
use thiserror::Error;

use crate::job::{ProcessEnd, how};

/// Why a case failed, or could not be run.
#[derive(Clone, Debug, PartialEq, Error)]
pub(crate) enum CaseFault {
    /// The system refuses what the case needs.
    #[error("{text}")]
    System {
        /// The words of the system, or of what writes a file for it.
        text: String,
    },
    /// A GPU failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A run failed.
    #[error(transparent)]
    Run(#[from] ExecError),
    /// Processes did not end as they must.
    #[error("{}", list_ends(ends))]
    Ended { ends: Vec<RankEnd> },
    /// What processes are compared with was lost.
    #[error("there is no run of threads")]
    NoThreads,
    /// Signals of a product are not those that it must raise.
    #[error("counters rose by {counted:?}, not by {wanted:?}")]
    Counters { counted: Vec<u32>, wanted: Vec<u32> },
    /// A product has other bits than the plainest launch of it.
    #[error("{bytes} bytes are unlike those of the plain launch")]
    UnlikePlain { bytes: usize },
    /// A product has other bits in another shape of tiles.
    #[error("{bytes} bytes of {shape} are unlike those of the first shape")]
    UnlikeFirst { bytes: usize, shape: String },
    /// A thread that compares was lost.
    #[error("the comparison ended early")]
    EndedEarly,
    /// An element behind the end of a row has changed.
    #[error("element {column} of row {row}, past its end, was written")]
    PastEnd { row: usize, column: usize },
    /// An element is out of its bound.
    #[error("row {row}, column {column} errs by {share:.2} of its bound")]
    OutOfBound { row: usize, column: usize, share: f64 },
    /// The case itself is wrong.
    #[error("the case has row {row} twice")]
    Twice { row: usize },
    /// A row of no problem has changed.
    #[error("row {row}, which is no problem's, was written")]
    OfNoProblem { row: usize },
    /// A transport that must be refused was taken.
    #[error("{transport} was not refused")]
    NotRefused { transport: TransportKind },
    /// A transport was refused for another reason.
    #[error("{transport}: {reason}")]
    RefusedOtherwise { transport: TransportKind, reason: CudaError },
}

impl From<io::Error> for CaseFault {
    fn from(error: io::Error) -> Self {
        Self::System { text: error.to_string() }
    }
}

impl CaseFault {
    /// How all of these ended, which are ranks 0 and on.
    pub(crate) fn ended(ended: &[ProcessEnd]) -> Self {
        Self::Ended { ends: ended.iter().enumerate().map(RankEnd::of).collect() }
    }
}

/// How the process of a rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("rank {rank} ended with {}: {line}", how(*code))]
pub(crate) struct RankEnd {
    rank: usize,
    /// Its exit status; without one a signal ended it.
    code: Option<i32>,
    /// The last line that it printed.
    line: String,
}

impl RankEnd {
    pub(crate) fn of((rank, ended): (usize, &ProcessEnd)) -> Self {
        Self { rank, code: ended.code, line: last_line(&ended.text).to_owned() }
    }
}

/// Several of them as one sentence.
pub(crate) fn list_ends(ends: &[RankEnd]) -> String {
    ends.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// The last line of what a process printed.
pub(crate) fn last_line(text: &str) -> &str {
    text.trim_end().lines().next_back().unwrap_or("nothing")
}
