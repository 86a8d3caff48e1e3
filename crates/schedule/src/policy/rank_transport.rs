//! The transports between ranks and the workloads over them, by the names that users know.

use std::fmt;

use counterpoint_plan::Topology;
use serde::{Deserialize, Serialize};

/// How rows get from one rank to another, by the names that users know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RankTransport {
    /// CPU ranks: threads, or processes over TCP or MPI.
    Cpu,
    /// Kernels that read and write the memory of other GPUs of the host.
    Nvlink,
    /// Copy engines that write into the memory of other GPUs of the host.
    CopyEngine,
    /// A library's sends and receives, on one node or several.
    Nccl,
    /// A library between nodes, kernels inside each.
    Hierarchical,
}

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Workload {
    /// Distributed attention.
    Attention,
    /// A pass of a tensor-parallel linear layer, or a matrix product with its collective.
    Linear,
    /// A pass of a layer of a mixture of experts.
    Experts,
}

impl RankTransport {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Nvlink, Self::CopyEngine, Self::Nccl, Self::Hierarchical];

    /// Its name on the command line; that of CPU ranks is their device's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Nvlink => "nvlink",
            Self::CopyEngine => "copy-engine",
            Self::Nccl => "nccl",
            Self::Hierarchical => "hierarchical",
        }
    }

    /// Whether what hosts of queries return is merged without a wait of ranks for each other's host.
    pub const fn merges_on_device(self) -> bool {
        matches!(self, Self::Cpu | Self::Nvlink)
    }

    /// Those that GPUs of such nodes have.
    pub fn of_gpus(topology: &Topology) -> &'static [Self] {
        match topology.nodes() {
            0 | 1 => &[Self::Nvlink, Self::CopyEngine, Self::Nccl],
            _ => &[Self::Hierarchical, Self::Nccl],
        }
    }
}

impl fmt::Display for RankTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
