//! Which transport runs which overlap policy: the one table that predictions, choices, help and errors read.

use std::fmt;

use counterpoint_plan::Topology;

use crate::{
    CommunicationPriority, HardwareQueues, Mover, OverlapPolicy, PassOverlap, SUMMING_WORKERS, WorkerShare,
};

/// How rows get from one rank to another, by the names that users know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// What becomes of a policy on a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicySupport {
    /// It runs as it is predicted.
    Runs,
    /// It runs, and results are the same, but what it asks for is not done: why.
    WithoutEffect(&'static str),
    /// It is refused: why.
    Refused(&'static str),
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

    /// What becomes of `policy` on it.
    pub const fn support(self, policy: &OverlapPolicy, workload: Workload) -> PolicySupport {
        match (policy.mover, workload) {
            (Mover::Fused, Workload::Attention) => {
                return PolicySupport::Refused(
                    "`fused` is for linear layers, whose products send rows as they make them; attention takes rows as they arrive \
                     with one stage for all work (--stages 0)",
                );
            }
            (Mover::Fused, Workload::Experts) => {
                return PolicySupport::Refused(
                    "`fused` is for linear layers; no kernel of experts sends rows as it makes them",
                );
            }
            _ => {}
        }
        match (self, policy) {
            (Self::Cpu, OverlapPolicy { workers: WorkerShare::Partition(_), .. }) => PolicySupport::Refused(
                "communication on CPU ranks has threads of its own, not a share of the workers",
            ),
            (
                Self::Cpu,
                OverlapPolicy {
                    priority: CommunicationPriority::High | CommunicationPriority::Ordinary, ..
                },
            ) => PolicySupport::Refused("threads of CPU ranks have no priorities"),
            (Self::Cpu, OverlapPolicy { queues: HardwareQueues::Single, .. }) => {
                PolicySupport::Refused("CPU ranks have no hardware queues")
            }
            _ => self.moves_by(policy.mover),
        }
    }

    /// What becomes of a policy's mover on it.
    pub const fn moves_by(self, mover: Mover) -> PolicySupport {
        match (mover, self) {
            (Mover::Transport, _) | (_, Self::Nvlink) | (Mover::CopyEngine, Self::CopyEngine) => {
                PolicySupport::Runs
            }
            (Mover::CopyEngine, Self::Cpu) => PolicySupport::Refused("CPU ranks have no copy engines"),
            (Mover::CopyEngine, Self::Nccl | Self::Hierarchical) => {
                PolicySupport::Refused("NCCL moves the rows of this transport; leave copy-engine out")
            }
            (Mover::Fused, Self::Cpu | Self::CopyEngine | Self::Nccl | Self::Hierarchical) => {
                PolicySupport::WithoutEffect(
                    "only kernels that write into other GPUs' memory send rows as they make them",
                )
            }
        }
    }

    /// The ways in which passes of linear layers can be run on it, all that run as they are predicted; of equally fast ones the
    /// preferred first. `has_barriers` where kernels of all ranks can wait for each other, and `workers` the multiprocessors of this
    /// transport's kernels.
    pub fn pass_overlaps(self, has_barriers: bool, workers: usize) -> Vec<PassOverlap> {
        use PassOverlap::{Barrier, Concurrent, CopyEngine, Fused, Margin, Sequential, Signals};
        // Threads of CPU ranks take no workers from products.
        if self == Self::Cpu {
            return vec![Sequential, Concurrent, Signals(0)];
        }
        // Where kernels have no barriers, ranks that read each other's memory do so on the host.
        let has_barriers = has_barriers || self != Self::Nvlink;
        let runs = |mover| has_barriers && self.moves_by(mover) == PolicySupport::Runs;
        let mut ways = vec![Sequential];
        ways.extend(runs(Mover::Fused).then_some(Fused));
        ways.extend(runs(Mover::CopyEngine).then_some(CopyEngine));
        // Copy engines leave kernels the sums alone.
        let workers = if self == Self::CopyEngine { SUMMING_WORKERS } else { workers };
        ways.extend([Barrier(workers), Margin(workers), Signals(workers)]);
        ways
    }

    /// As [`RankTransport::any_of`] those of such nodes of GPUs.
    ///
    /// # Errors
    /// Why none does.
    pub fn any_of_gpus(
        topology: &Topology,
        policy: &OverlapPolicy,
        workload: Workload,
    ) -> Result<Self, &'static str> {
        Self::any_of(Self::of_gpus(topology), policy, workload)
    }

    /// The first of `transports` that runs `policy` as it is predicted; else what the first of them says.
    ///
    /// # Errors
    /// Why none does.
    pub fn any_of(
        transports: &[Self],
        policy: &OverlapPolicy,
        workload: Workload,
    ) -> Result<Self, &'static str> {
        let mut refusal = None;
        for &transport in transports {
            match transport.support(policy, workload) {
                PolicySupport::Runs => return Ok(transport),
                PolicySupport::WithoutEffect(reason) | PolicySupport::Refused(reason) => {
                    refusal.get_or_insert(reason);
                }
            }
        }
        Err(refusal.unwrap_or("there is no transport"))
    }

    /// The table, for people: a line a transport, a column for each mover that is named.
    pub fn table() -> String {
        let mut text =
            format!("{:14}{:13}{:22}{}\n", "transport", "copy-engine", "fused", "partition, priority,");
        text.push_str(&format!("{:14}{:13}{:22}{}\n", "", "", "(linear layers)", "single-connection"));
        for transport in Self::ALL {
            let word = |support| match support {
                PolicySupport::Runs => "yes",
                PolicySupport::WithoutEffect(_) => "no: parts in turn",
                PolicySupport::Refused(_) => "refused",
            };
            let sharing = OverlapPolicy { queues: HardwareQueues::Single, ..OverlapPolicy::default() };
            let [engines, fused] =
                [Mover::CopyEngine, Mover::Fused].map(|mover| word(transport.moves_by(mover)));
            let sharing = word(transport.support(&sharing, Workload::Linear));
            text.push_str(&format!("{:14}{engines:13}{fused:22}{sharing}\n", transport.name()));
        }
        text
    }
}

impl fmt::Display for RankTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> OverlapPolicy {
        text.parse().unwrap()
    }

    #[test]
    fn what_runs_depends_on_the_nodes() {
        let (one, two) = (Topology::flat(8), Topology { world_size: 16, ranks_per_node: 8 });
        let runs = |topology: &Topology, text: &str, workload| {
            RankTransport::any_of_gpus(topology, &policy(text), workload).is_ok()
        };
        for text in
            ["sequential", "concurrent", "kernel-barrier+sm-margin=16", "priority", "single-connection"]
        {
            for workload in [Workload::Attention, Workload::Linear] {
                assert!(runs(&one, text, workload) && runs(&two, text, workload), "{text}");
            }
        }
        assert!(
            runs(&one, "copy-engine", Workload::Attention) && !runs(&two, "copy-engine", Workload::Attention)
        );
        assert!(runs(&one, "fused", Workload::Linear) && !runs(&two, "fused", Workload::Linear));
        assert!(!runs(&one, "fused", Workload::Attention));
    }

    #[test]
    fn cpu_ranks_refuse_what_only_gpus_have() {
        for text in ["partition=2", "priority", "ordinary-priority", "single-connection", "copy-engine"] {
            let support = RankTransport::Cpu.support(&policy(text), Workload::Linear);
            assert!(matches!(support, PolicySupport::Refused(_)), "{text}: {support:?}");
        }
        assert_eq!(
            RankTransport::Cpu.support(&policy("signals+sm-margin=1"), Workload::Linear),
            PolicySupport::Runs
        );
    }

    #[test]
    fn the_table_has_a_line_for_each() {
        let table = RankTransport::table();
        assert!(table.lines().all(|line| line.len() <= 76), "{table}");
        assert!(table.contains("\nnvlink        yes          yes"), "{table}");
        assert!(table.contains("\nhierarchical  refused      no: parts in turn"), "{table}");
    }
}
