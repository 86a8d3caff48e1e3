use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

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
}

impl StartOrder {
    /// Every order, in the order in which they are explained.
    pub const ALL: [StartOrder; 3] =
        [StartOrder::Sequential, StartOrder::Concurrent, StartOrder::KernelBarrier];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            StartOrder::Sequential => "sequential",
            StartOrder::Concurrent => "concurrent",
            StartOrder::KernelBarrier => "kernel-barrier",
        }
    }
}

/// How the machine is brought to run a Program's communication under its computation. Never changes results.
///
/// Written `kernel-barrier+sm-margin=2`: an order of starts, then what combines with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OverlapPolicy {
    /// Order of starts.
    pub start: StartOrder,
    /// Compute workers (threads, SMs) left to communication.
    pub sm_margin: usize,
}

impl fmt::Display for OverlapPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.start.name())?;
        if self.sm_margin > 0 {
            write!(f, "+sm-margin={}", self.sm_margin)?;
        }
        Ok(())
    }
}

/// Why a text names no overlap policy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PolicyError {
    /// The order of starts is unknown.
    #[error("unknown overlap policy `{0}`; use sequential, concurrent or kernel-barrier")]
    Start(String),
    /// What follows a `+` is unknown.
    #[error("unknown overlap option `{0}`; use sm-margin=N, with N the number of workers to leave free")]
    Option(String),
}

impl FromStr for OverlapPolicy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let mut words = text.split('+');
        let start = words.next().unwrap_or_default();
        let start = StartOrder::ALL
            .into_iter()
            .find(|order| order.name() == start)
            .ok_or_else(|| PolicyError::Start(start.to_owned()))?;
        let mut policy = OverlapPolicy { start, sm_margin: 0 };
        for word in words {
            policy.sm_margin = word
                .strip_prefix("sm-margin=")
                .and_then(|n| n.parse().ok())
                .ok_or_else(|| PolicyError::Option(word.to_owned()))?;
        }
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        for text in ["sequential", "concurrent", "kernel-barrier", "kernel-barrier+sm-margin=3"] {
            assert_eq!(text.parse::<OverlapPolicy>().unwrap().to_string(), text);
        }
        for text in ["", "fast", "concurrent+", "concurrent+sm-margin=x", "sm-margin=1"] {
            assert!(text.parse::<OverlapPolicy>().is_err(), "{text}");
        }
    }
}
