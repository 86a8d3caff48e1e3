use serde::{Deserialize, Serialize};

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

/// How the machine is brought to run a Program's communication under its computation. Never changes results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OverlapPolicy {
    /// Order of starts.
    pub start: StartOrder,
    /// Compute workers (threads, SMs) left to communication.
    pub sm_margin: usize,
}
