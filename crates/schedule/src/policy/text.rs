//! The words by which overlap policies are written and read, and what is wrong with a text that names none.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::{CommunicationPriority, HardwareQueues, Mover, OverlapPolicy, StartOrder, WorkerShare};

impl fmt::Display for OverlapPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.start.rules().word)?;
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
        match self.mover.rules().word {
            Some(word) => write!(f, "+{word}"),
            None => Ok(()),
        }
    }
}

/// Why a text names no overlap policy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A word is unknown.
    #[error("unknown overlap policy `{word}`; use {words}, joined by +", words = words())]
    Unknown {
        /// The word.
        word: String,
    },
    /// A number of workers is none.
    #[error("overlap policy `{word}` needs a number of workers of at least 1, as in {name}=8")]
    Workers {
        /// What was written.
        word: String,
        /// What stands before the number.
        name: &'static str,
    },
    /// Two words that contradict each other.
    #[error("overlap policy `{first}` and `{second}` exclude each other; use one of them")]
    Exclusive {
        /// The one that was written first.
        first: String,
        /// The other.
        second: String,
    },
    /// Something besides `sequential`.
    #[error("overlap policy `sequential` overlaps nothing, so `{word}` has nothing to act on; leave it out")]
    WithSequential {
        /// The word that has nothing to act on.
        word: String,
    },
    /// A part of a list of passes that is none, or a pass that is missing or named twice.
    #[error(
        "`{text}` does not name a policy for each pass once; write one policy, or forward=POLICY,backward=POLICY"
    )]
    Passes {
        /// The list, or the part of it that is wrong.
        text: String,
    },
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
            let start = StartOrder::ALL.into_iter().find(|order| order.rules().word == word);
            let moved_by = Mover::ALL.into_iter().find(|mover| mover.rules().word == Some(word));
            let exclusive = match (start.ok_or(moved_by), word) {
                (Ok(start), _) => {
                    policy.start = start;
                    order.replace(word)
                }
                (Err(Some(moved_by)), _) => {
                    policy.mover = moved_by;
                    mover.replace(word)
                }
                (_, "priority") => {
                    policy.priority = CommunicationPriority::High;
                    priority.replace(word)
                }
                (_, "ordinary-priority") => {
                    policy.priority = CommunicationPriority::Ordinary;
                    priority.replace(word)
                }
                (_, "single-connection") => {
                    policy.queues = HardwareQueues::Single;
                    None
                }
                _ => {
                    policy.workers = worker_share(word)?;
                    share.replace(word)
                }
            };
            if let Some(other) = exclusive {
                return Err(PolicyError::Exclusive { first: other.to_owned(), second: word.to_owned() });
            }
            if start.is_none_or(|start| start.rules().overlaps) {
                last = Some(word);
            }
        }
        match (policy.overlaps(), last) {
            (false, Some(word)) => Err(PolicyError::WithSequential { word: word.to_owned() }),
            _ => Ok(policy),
        }
    }
}

/// Every word that a policy may have.
fn words() -> String {
    let orders = StartOrder::ALL.map(|order| order.rules().word).to_vec();
    let mut movers: Vec<_> = Mover::ALL.into_iter().filter_map(|mover| mover.rules().word).collect();
    movers.sort_unstable();
    let others = vec!["single-connection", "priority", "ordinary-priority"];
    format!("{}, sm-margin=N or partition=N", [orders, others, movers].concat().join(", "))
}

fn worker_share(word: &str) -> Result<WorkerShare, PolicyError> {
    let share = |name: &'static str, share: fn(usize) -> WorkerShare| {
        let number = word.strip_prefix(name)?.strip_prefix('=')?;
        let workers = number.parse().ok().filter(|workers| *workers > 0);
        Some(workers.map(share).ok_or_else(|| PolicyError::Workers { word: word.to_owned(), name }))
    };
    let found =
        share("sm-margin", WorkerShare::Margin).or_else(|| share("partition", WorkerShare::Partition));
    found.unwrap_or_else(|| Err(PolicyError::Unknown { word: word.to_owned() }))
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
            assert!(matches!(refused(text), PolicyError::Unknown { .. }), "{text}");
        }
        for text in ["concurrent+sm-margin=x", "partition=0", "sm-margin=-1"] {
            assert!(matches!(refused(text), PolicyError::Workers { .. }), "{text}");
        }
        for text in [
            "sm-margin=2+partition=2",
            "concurrent+kernel-barrier",
            "kernel-barrier+signals",
            "fused+copy-engine",
            "priority+ordinary-priority",
        ] {
            assert!(matches!(refused(text), PolicyError::Exclusive { .. }), "{text}");
        }
        for text in ["sequential+sm-margin=1", "priority+sequential"] {
            assert!(matches!(refused(text), PolicyError::WithSequential { .. }), "{text}");
        }
        assert_eq!(refused("auto"), PolicyError::Unpicked);
    }
}
