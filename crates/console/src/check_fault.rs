//! What came out wrong of something that ran.

use std::io;
use std::process::ExitStatus;

use counterpoint_reference::CheckReport;
use thiserror::Error;

/// What came out wrong of something that ran.
#[derive(Debug, Error)]
pub enum CheckFault {
    /// Results are out of their bounds.
    #[error("out of bounds against the f64 reference: {}", report.failures())]
    OutOfBounds {
        /// The comparison.
        report: Box<CheckReport>,
    },
    /// Rows of a benchmark are wrong.
    #[error("{what}: {}", rows.join("; "))]
    Rows {
        /// What they are, such as `results out of bounds against f64`.
        what: &'static str,
        /// Each, by its name and in its own words.
        rows: Vec<String>,
    },
    /// Calls of a group gave other results than a run alone.
    #[error("{elements} elements of calls of a group")]
    OfCalls {
        /// Elements that are unlike.
        elements: usize,
    },
    /// Checks of a self-test failed, or there were none.
    #[error(
        "{} of {checks} failed, the first: {}",
        counterpoint_report::format_counted(*failed, "check"),
        first.as_deref().unwrap_or("there was nothing to check")
    )]
    SelfTest {
        /// How many failed.
        failed: usize,
        /// How many were made.
        checks: usize,
        /// The first that failed.
        first: Option<String>,
    },
    /// Compiled kernels are not what they must be.
    #[error("{} in compiled kernels, the first: {kernel}: {line}", counterpoint_report::format_counted(*faults, "fault"))]
    Kernels {
        /// How many faults there are.
        faults: usize,
        /// The first kernel that has one.
        kernel: String,
        /// The first line of what the compiler, or our own check, says of it.
        line: String,
    },
    /// There is no folder for files of a run.
    #[error("there is no temporary folder: {source}; set TMPDIR")]
    NoTemporaryFolder {
        /// The system's words.
        source: io::Error,
    },
    /// Kernels started before a barrier that they had to wait at.
    #[error("computation started before communication in spite of a kernel barrier: {}", list_starts(starts))]
    EarlyStarts {
        /// Where, and how often.
        starts: Vec<EarlyStarts>,
    },
    /// A process that measures by itself failed.
    #[error("the process with {connections} connections: {reason}")]
    Child {
        /// The connections to the device that it was given.
        connections: u32,
        /// Why.
        reason: ChildFault,
    },
    /// The comparison with PyTorch failed.
    #[error(transparent)]
    PyTorch(#[from] PyTorchFault),
}

/// How often kernels of a transport started too early.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{early} of {rounds} rounds ({transport}, {queues} queues)")]
pub struct EarlyStarts {
    /// In how many rounds.
    pub early: u32,
    /// Of how many.
    pub rounds: u32,
    /// The transport.
    pub transport: String,
    /// Hardware queues, or `default`.
    pub queues: String,
}

/// Why a process of this program gave nothing.
#[derive(Debug, Error)]
pub enum ChildFault {
    /// It cannot be started, or not be waited for.
    #[error(transparent)]
    System(#[from] io::Error),
    /// It failed.
    #[error("it ended with {0}")]
    Ended(ExitStatus),
    /// What it printed cannot be read.
    #[error(transparent)]
    Printed(#[from] serde_json::Error),
    /// It printed nothing but this.
    #[error("{text}")]
    Said {
        /// Its own words.
        text: String,
    },
}

/// How a comparison with PyTorch ended before its time.
#[derive(Debug, Error)]
pub enum PyTorchFault {
    /// Its ranks have not the same variants.
    #[error("PyTorch's ranks have unlike numbers of ways ready: {counts:?}")]
    UnlikeCounts {
        /// How many each has.
        counts: Vec<usize>,
    },
    /// A rank's answer cannot be read.
    #[error("rank {rank} of the comparison with PyTorch answered {line:?} ({source})")]
    Answer {
        /// The rank.
        rank: usize,
        /// What it printed.
        line: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// Its ranks read no requests.
    #[error("PyTorch's ranks do not listen ({0})")]
    Deaf(io::Error),
    /// A rank failed.
    #[error("the comparison with PyTorch ended with {0}")]
    Ended(ExitStatus),
    /// A rank ended when there was more to do.
    #[error("a rank of the comparison with PyTorch ended before the others")]
    EndedEarly,
    /// A rank gives no answer.
    #[error("rank {rank} of the comparison with PyTorch gave no answer in {seconds} s")]
    NoAnswer {
        /// The rank.
        rank: usize,
        /// How long it was waited for.
        seconds: u64,
    },
}

fn list_starts(starts: &[EarlyStarts]) -> String {
    starts.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
