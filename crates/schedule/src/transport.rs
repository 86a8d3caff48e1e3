//! Which transport runs which overlap policy: the one table that predictions, choices, help and errors read.

use counterpoint_plan::Topology;

use crate::policy::{LayerRanks, LayerRules};
use crate::{
    CommunicationPriority, HardwareQueues, Mover, OverlapPolicy, PassOverlap, PolicySupport, RankTransport,
    SUMMING_WORKERS, StartOrder, WorkerShare, Workload,
};

impl RankTransport {
    /// What becomes of `policy` on it.
    pub fn support(self, policy: &OverlapPolicy, workload: Workload) -> PolicySupport {
        if let Some(reason) = (policy.mover.rules().refuses)(workload) {
            return PolicySupport::Refused(reason);
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
    pub fn moves_by(self, mover: Mover) -> PolicySupport {
        (mover.rules().on)(self)
    }

    /// All that can be said to move rows on it.
    pub fn movers(self) -> Vec<Mover> {
        let refused = |mover: &Mover| matches!(self.moves_by(*mover), PolicySupport::Refused(_));
        Mover::ALL.into_iter().filter(|mover| !refused(mover)).collect()
    }

    /// The ways in which passes of linear layers can be run on it, all that run as they are predicted; of equally fast ones the
    /// preferred first. `has_barriers` where kernels of all ranks can wait for each other, and `workers` the multiprocessors of this
    /// transport's kernels.
    pub fn pass_overlaps(self, has_barriers: bool, workers: usize) -> Vec<PassOverlap> {
        // Copy engines leave kernels the sums alone.
        let workers = if self == Self::CopyEngine { SUMMING_WORKERS } else { workers };
        // Where kernels have no barriers, ranks that read each other's memory do so on the host.
        let has_barriers = has_barriers || self != Self::Nvlink;
        let by_order = StartOrder::ALL.map(|order| (OverlapPolicy::new(order), order.rules().layers));
        let runs = |mover: &Mover| has_barriers && self.moves_by(*mover) == PolicySupport::Runs;
        let by_mover = Mover::ALL.into_iter().filter(runs);
        let by_mover =
            by_mover.map(|mover| (OverlapPolicy { mover, ..OverlapPolicy::default() }, mover.rules().layers));
        let all = by_order.into_iter().chain(by_mover);
        let ways = all.flat_map(|(policy, layers)| layers.iter().map(move |rules| (policy, rules)));
        let of_these = |rules: &LayerRules| match rules.ranks {
            LayerRanks::All => true,
            LayerRanks::Cpu => self == Self::Cpu,
            LayerRanks::Gpus => self != Self::Cpu,
        };
        let mut ways: Vec<_> = ways.filter(|(_, rules)| of_these(rules)).collect();
        ways.sort_by_key(|(_, rules)| rules.preference);
        ways.into_iter().map(|(policy, rules)| PassOverlap::new(policy, rules, workers)).collect()
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
        let word = |support| match support {
            PolicySupport::Runs => "yes",
            PolicySupport::WithoutEffect(_) => "no: parts in turn",
            PolicySupport::Refused(_) => "refused",
        };
        let names = Self::ALL.map(Self::name);
        let mut columns = vec![[&["transport", ""], &names[..]].concat()];
        let mut movers: Vec<_> =
            Mover::ALL.into_iter().filter_map(|mover| Some((mover.rules().word?, mover))).collect();
        movers.sort_unstable_by_key(|(word, _)| *word);
        for (name, mover) in movers {
            let for_layers_alone = (mover.rules().refuses)(Workload::Attention).is_some();
            let cells = Self::ALL.map(|transport| word(transport.moves_by(mover)));
            columns
                .push([&[name, if for_layers_alone { "(linear layers)" } else { "" }], &cells[..]].concat());
        }
        let sharing = OverlapPolicy { queues: HardwareQueues::Single, ..OverlapPolicy::default() };
        let cells = Self::ALL.map(|transport| word(transport.support(&sharing, Workload::Linear)));
        columns.push([&["partition, priority,", "single-connection"], &cells[..]].concat());
        let widths: Vec<usize> =
            columns.iter().map(|cells| cells.iter().map(|cell| cell.len()).max().unwrap_or(0) + 2).collect();
        let line = |at: usize| -> String {
            let cells = columns.iter().zip(&widths).map(|(cells, width)| format!("{:width$}", cells[at]));
            cells.collect::<String>().trim_end().to_owned() + "\n"
        };
        (0..Self::ALL.len() + 2).map(line).collect()
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
