//! Policies by name, for those who want a certain one: tests, benchmarks, what others are compared with.

use super::table::{Mover, StartOrder};
use super::{CommunicationPriority, HardwareQueues, OverlapPolicy, WorkerShare};

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

    /// Nothing overlaps: what others are compared with.
    pub const SEQUENTIAL: Self = Self::new(StartOrder::Sequential);
    /// A stream for each; the default.
    pub const CONCURRENT: Self = Self::new(StartOrder::Concurrent);
    /// A computation starts only once the communication that it should hide has started.
    pub const KERNEL_BARRIER: Self = Self::new(StartOrder::KernelBarrier);
    /// The products of a pass are one kernel.
    pub const SIGNALS: Self = Self::new(StartOrder::Signals);
    /// Kernels that make or take rows move them.
    pub const FUSED: Self = Self { mover: Mover::Fused, ..Self::new(StartOrder::Concurrent) };
}
