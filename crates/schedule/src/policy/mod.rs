//! Overlap policies: when communication starts, which SMs it takes and what moves its rows. `table.rs` lists the orders of starts and the
//! movers; each has a file of its own, which says all that others ask of it (`rules.rs`).

mod by_transport;
mod concurrent;
mod copy_engine;
mod fused;
mod kernel_barrier;
mod named;
mod pass_overlap;
mod rank_transport;
mod rules;
mod sequential;
mod signals;
mod table;
mod text;

use serde::{Deserialize, Serialize};

pub use pass_overlap::PassOverlap;
pub use rank_transport::{RankTransport, Workload};
pub use rules::{
    EngineCollectives, GroupTiming, MoverRules, OrderRules, PassTiming, PolicySupport, ProductStart,
    SUMMING_WORKERS,
};
pub(crate) use rules::{LayerRanks, LayerRules};
pub use table::{Mover, StartOrder};
pub use text::PolicyError;

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

impl Mover {
    /// The default policy with each mover that a policy may name and that this workload is not refused with.
    pub fn named_for(workload: Workload) -> impl Iterator<Item = OverlapPolicy> {
        let named =
            move |mover: &Mover| mover.rules().word.is_some() && (mover.rules().refuses)(workload).is_none();
        Self::ALL.into_iter().filter(named).map(|mover| OverlapPolicy { mover, ..OverlapPolicy::default() })
    }
}

impl StartOrder {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        self.rules().word
    }
}

impl OverlapPolicy {
    /// Whether communication and computation have streams of their own.
    pub const fn overlaps(&self) -> bool {
        self.start.rules().overlaps
    }

    /// Whether a computation waits for the communication that it should hide to start.
    pub fn has_barriers(&self) -> bool {
        self.start.rules().starts == ProductStart::AfterCommunication
    }

    /// Whether the products of a pass are one kernel, whose rows leave by signals.
    pub fn is_in_waves(&self) -> bool {
        self.start.rules().starts == ProductStart::OneKernel
    }

    /// Whether kernels send or take rows as they compute.
    pub const fn is_fused(&self) -> bool {
        self.mover.rules().in_kernels
    }

    /// Whether all collectives are left to copy engines, which take no worker.
    pub fn moves_by_engines(&self) -> bool {
        self.mover.rules().engines == EngineCollectives::Everything
    }

    /// Whether the transport's own means move all rows.
    pub fn moves_by_transport(&self) -> bool {
        self.mover.rules().engines == EngineCollectives::Nothing
    }

    /// Whether communication can start however much computation has started before it, and nothing waits until it has.
    pub fn leaves_workers(&self) -> bool {
        let apart = self.workers != WorkerShare::Common || !self.moves_by_transport();
        self.overlaps() && self.start.rules().starts == ProductStart::Free && apart
    }

    /// Whether what one group of a pass sends travels under another's product: a kernel that sends its tiles as they are done has no use
    /// for groups.
    pub const fn overlaps_by_groups(&self) -> bool {
        self.overlaps() && !self.is_fused()
    }

    /// This policy with so many workers left free by computation.
    #[must_use]
    pub const fn leaving(mut self, workers: usize) -> Self {
        self.workers = if workers == 0 { WorkerShare::Common } else { WorkerShare::Margin(workers) };
        self
    }

    /// Workers that compute operations leave free by themselves.
    pub const fn sm_margin(&self) -> usize {
        match self.workers {
            WorkerShare::Margin(workers) => workers,
            WorkerShare::Common | WorkerShare::Partition(_) => 0,
        }
    }
}
