//! Overlap policies: when communication starts, which SMs it takes and what moves its rows; and the text that names one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{PassOverlap, SUMMING_WORKERS};

/// What decides when a communication and the computation that may run beside it start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartOrder {
    /// One stream: nothing overlaps. The reference for correctness and for "never slower".
    Sequential,
    /// A stream for each; events order only what depends on each other. The default.
    #[default]
    Concurrent,
    /// As `Concurrent`, and a computation starts only once the communication that it should hide has started.
    KernelBarrier,
    /// As `Concurrent`, and the products of a pass are one kernel, which goes on while what it has finished travels: a
    /// communication starts once a signal says that its rows are there.
    Signals,
}

impl StartOrder {
    /// Every order, in the order in which they are explained.
    pub const ALL: [StartOrder; 4] =
        [StartOrder::Sequential, StartOrder::Concurrent, StartOrder::KernelBarrier, StartOrder::Signals];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            StartOrder::Sequential => "sequential",
            StartOrder::Concurrent => "concurrent",
            StartOrder::KernelBarrier => "kernel-barrier",
            StartOrder::Signals => "signals",
        }
    }
}

/// Who may use the machine's workers (threads, SMs).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerShare {
    /// Computation and communication, all of them.
    #[default]
    Common,
    /// Compute operations start on so many fewer, which are then free for communication.
    Margin(usize),
    /// Disjoint sets: so many for communication, the others for computation (green contexts on CUDA).
    Partition(usize),
}

/// The priority of communication streams over compute streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CommunicationPriority {
    /// As the backend sets it for all streams of that kind: on CUDA above computation.
    #[default]
    Usual,
    /// Above computation.
    High,
    /// That of computation, to see what a priority does.
    Ordinary,
}

/// Hardware queues that streams are fed through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HardwareQueues {
    /// As the machine has them.
    #[default]
    Many,
    /// One: operations start in the order in which they are enqueued (`CUDA_DEVICE_MAX_CONNECTIONS=1`).
    Single,
}

/// What moves rows between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mover {
    /// What the transport uses by itself.
    #[default]
    Transport,
    /// Copy engines, which take no worker.
    CopyEngine,
    /// The kernels that make or take the rows, as they do so, where the transport has such kernels, and copy engines what other
    /// group-casts send. A transport with such kernels has copy engines too, so nothing beside a kernel that waits for rows needs a
    /// worker.
    Fused,
}

/// How the machine is brought to run a Program's communication under its computation. Never changes results.
///
/// Written as words joined by `+`, such as `kernel-barrier+sm-margin=2`; without an order of starts it is `concurrent`.
/// A lowering turns the order of starts into streams and barriers; everything else is for the backend, which refuses what
/// it cannot do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OverlapPolicy {
    /// Order of starts.
    pub start: StartOrder,
    /// Who may use which workers.
    pub workers: WorkerShare,
    /// Priority of communication.
    pub priority: CommunicationPriority,
    /// Hardware queues.
    pub queues: HardwareQueues,
    /// What moves rows.
    pub mover: Mover,
}

impl OverlapPolicy {
    /// An order of starts and nothing else.
    pub const fn new(start: StartOrder) -> Self {
        Self {
            start,
            workers: WorkerShare::Common,
            priority: CommunicationPriority::Usual,
            queues: HardwareQueues::Many,
            mover: Mover::Transport,
        }
    }

    /// Whether what one group of a pass sends travels under another's product: a kernel that sends its tiles as they are done has no use
    /// for groups.
    pub const fn overlaps_by_groups(&self) -> bool {
        !matches!((self.mover, self.start), (Mover::Fused, _) | (_, StartOrder::Sequential))
    }

    /// Workers that compute operations leave free by themselves.
    pub const fn sm_margin(&self) -> usize {
        match self.workers {
            WorkerShare::Margin(workers) => workers,
            WorkerShare::Common | WorkerShare::Partition(_) => 0,
        }
    }
}

impl From<PassOverlap> for OverlapPolicy {
    /// The policy that has a pass of a layer run so.
    fn from(way: PassOverlap) -> Self {
        let concurrent = Self::default();
        let leaving = |start, workers| Self {
            workers: if workers == 0 { WorkerShare::Common } else { WorkerShare::Margin(workers) },
            ..Self::new(start)
        };
        match way {
            PassOverlap::Sequential => Self::new(StartOrder::Sequential),
            PassOverlap::Concurrent => concurrent,
            PassOverlap::Barrier(_) => Self::new(StartOrder::KernelBarrier),
            PassOverlap::Margin(workers) => leaving(StartOrder::KernelBarrier, workers),
            PassOverlap::Signals(workers) => leaving(StartOrder::Signals, workers),
            PassOverlap::Fused => Self { mover: Mover::Fused, ..concurrent },
            PassOverlap::CopyEngine => {
                Self { mover: Mover::CopyEngine, workers: WorkerShare::Margin(SUMMING_WORKERS), ..concurrent }
            }
        }
    }
}

impl fmt::Display for OverlapPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.start.name())?;
        match self.workers {
            WorkerShare::Common => {}
            WorkerShare::Margin(workers) => write!(f, "+sm-margin={workers}")?,
            WorkerShare::Partition(workers) => write!(f, "+partition={workers}")?,
        }
        f.write_str(match self.priority {
            CommunicationPriority::Usual => "",
            CommunicationPriority::High => "+priority",
            CommunicationPriority::Ordinary => "+ordinary-priority",
        })?;
        if self.queues == HardwareQueues::Single {
            f.write_str("+single-connection")?;
        }
        match self.mover {
            Mover::Transport => Ok(()),
            Mover::CopyEngine => f.write_str("+copy-engine"),
            Mover::Fused => f.write_str("+fused"),
        }
    }
}

/// Why a text names no overlap policy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A word is unknown.
    #[error(
        "unknown overlap policy `{0}`; use sequential, concurrent, kernel-barrier, signals, single-connection, priority, \
         ordinary-priority, copy-engine, fused, sm-margin=N or partition=N, joined by +"
    )]
    Word(String),
    /// A number of workers is none.
    #[error("overlap policy `{0}` needs a number of workers of at least 1, as in {1}=8")]
    Workers(String, &'static str),
    /// Two words that contradict each other.
    #[error("overlap policy `{0}` and `{1}` exclude each other; use one of them")]
    Exclusive(String, String),
    /// Something beside `sequential`.
    #[error("overlap policy `sequential` overlaps nothing, so `{0}` has nothing to act on; leave it out")]
    BesideSequential(String),
    /// A part of a list of passes that is none, or a pass that is missing or named twice.
    #[error(
        "`{0}` does not name a policy for each pass once; write one policy, or forward=POLICY,backward=POLICY"
    )]
    Pass(String),
    /// `auto`, where a policy must be named.
    #[error(
        "overlap policy `auto` is picked by prediction or measurement; name a policy here, such as concurrent"
    )]
    Unpicked,
}

impl FromStr for OverlapPolicy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        if text == "auto" {
            return Err(PolicyError::Unpicked);
        }
        let mut policy = OverlapPolicy::default();
        // What each aspect was set by.
        let (mut order, mut share, mut mover, mut priority, mut last) = (None, None, None, None, None);
        for word in text.split('+') {
            let start = StartOrder::ALL.into_iter().find(|order| order.name() == word);
            let exclusive = match (start, word) {
                (Some(start), _) => {
                    policy.start = start;
                    order.replace(word)
                }
                (None, "priority") => {
                    policy.priority = CommunicationPriority::High;
                    priority.replace(word)
                }
                (None, "ordinary-priority") => {
                    policy.priority = CommunicationPriority::Ordinary;
                    priority.replace(word)
                }
                (None, "single-connection") => {
                    policy.queues = HardwareQueues::Single;
                    None
                }
                (None, "copy-engine") => {
                    policy.mover = Mover::CopyEngine;
                    mover.replace(word)
                }
                (None, "fused") => {
                    policy.mover = Mover::Fused;
                    mover.replace(word)
                }
                (None, _) => {
                    policy.workers = worker_share(word)?;
                    share.replace(word)
                }
            };
            if let Some(other) = exclusive {
                return Err(PolicyError::Exclusive(other.to_owned(), word.to_owned()));
            }
            if start != Some(StartOrder::Sequential) {
                last = Some(word);
            }
        }
        match (policy.start, last) {
            (StartOrder::Sequential, Some(word)) => Err(PolicyError::BesideSequential(word.to_owned())),
            _ => Ok(policy),
        }
    }
}

fn worker_share(word: &str) -> Result<WorkerShare, PolicyError> {
    let share = |name: &'static str, share: fn(usize) -> WorkerShare| {
        let number = word.strip_prefix(name)?.strip_prefix('=')?;
        let workers = number.parse().ok().filter(|workers| *workers > 0);
        Some(workers.map(share).ok_or_else(|| PolicyError::Workers(word.to_owned(), name)))
    };
    let found =
        share("sm-margin", WorkerShare::Margin).or_else(|| share("partition", WorkerShare::Partition));
    found.unwrap_or_else(|| Err(PolicyError::Word(word.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let canonical = [
            "sequential",
            "concurrent",
            "kernel-barrier",
            "kernel-barrier+sm-margin=3",
            "signals+sm-margin=16",
            "concurrent+partition=16+priority",
            "kernel-barrier+sm-margin=8+priority+single-connection+copy-engine",
            "concurrent+fused",
            "concurrent+ordinary-priority",
        ];
        for text in canonical {
            assert_eq!(text.parse::<OverlapPolicy>().unwrap().to_string(), text);
        }
        for (text, same) in [
            ("sm-margin=1", "concurrent+sm-margin=1"),
            ("copy-engine+kernel-barrier", "kernel-barrier+copy-engine"),
            ("single-connection", "concurrent+single-connection"),
        ] {
            assert_eq!(text.parse::<OverlapPolicy>().unwrap().to_string(), same);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let refused = |text: &str| text.parse::<OverlapPolicy>().unwrap_err();
        for text in ["", "fast", "concurrent+", "kernel-barrier+sm_margin=2"] {
            assert!(matches!(refused(text), PolicyError::Word(_)), "{text}");
        }
        for text in ["concurrent+sm-margin=x", "partition=0", "sm-margin=-1"] {
            assert!(matches!(refused(text), PolicyError::Workers(..)), "{text}");
        }
        for text in [
            "sm-margin=2+partition=2",
            "concurrent+kernel-barrier",
            "kernel-barrier+signals",
            "fused+copy-engine",
            "priority+ordinary-priority",
        ] {
            assert!(matches!(refused(text), PolicyError::Exclusive(..)), "{text}");
        }
        for text in ["sequential+sm-margin=1", "priority+sequential"] {
            assert!(matches!(refused(text), PolicyError::BesideSequential(_)), "{text}");
        }
        assert_eq!(refused("auto"), PolicyError::Unpicked);
    }
}
