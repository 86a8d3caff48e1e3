//! The transports between GPUs by name: NVLink kernels, copy engines, NCCL, or a hierarchy of them.

use std::fmt;

use counterpoint_schedule::PassOverlap;
use counterpoint_schedule::RankTransport;

/// How rows travel between GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// [`TransportKind::Nvlink`] where all GPUs reach each other's memory, else [`TransportKind::Nccl`]. Processes on several
    /// nodes: [`TransportKind::Hierarchical`].
    #[default]
    Auto,
    /// Kernels of a few multiprocessors read the other GPUs' memory. Where each rank has a GPU of its own, ranks pass barriers inside
    /// these kernels; where they share one, on the host.
    Nvlink,
    /// The copy engines write into the other GPUs' memory; no multiprocessor takes part in a group-cast, and in a group-reduce
    /// only for the sum.
    CopyEngine,
    /// NCCL's sends and receives, with a pass that gathers what is sent before and one that scatters or sums after.
    Nccl,
    /// For ranks that are processes: NCCL between nodes, and inside each what [`TransportKind::Nvlink`] is.
    Hierarchical,
}

impl TransportKind {
    /// All of them, by the names that users know.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("auto", Self::Auto),
        ("nvlink", Self::Nvlink),
        ("copy-engine", Self::CopyEngine),
        ("nccl", Self::Nccl),
        ("hierarchical", Self::Hierarchical),
    ];

    /// The ways in which passes of linear layers can be run; `has_barriers` where kernels of all ranks can wait for each other, and
    /// `workers` the multiprocessors of this transport's kernels.
    pub(crate) fn pass_overlaps(self, has_barriers: bool, workers: usize) -> Vec<PassOverlap> {
        self.transport().pass_overlaps(has_barriers, workers)
    }

    /// What it is in the table of what runs where, on one node where that is left open.
    pub const fn transport(self) -> RankTransport {
        match self {
            Self::Auto | Self::Nvlink => RankTransport::Nvlink,
            Self::CopyEngine => RankTransport::CopyEngine,
            Self::Nccl => RankTransport::Nccl,
            Self::Hierarchical => RankTransport::Hierarchical,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
