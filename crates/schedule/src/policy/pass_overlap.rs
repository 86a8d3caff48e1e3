//! The ways in which a pass of a linear layer and its collectives share a device.

use super::OverlapPolicy;
use super::rules::{LayerMargin, LayerRules, PassTiming, ProductStart};

/// How a pass and its collectives share a device: a policy, and how its seconds are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PassOverlap {
    policy: OverlapPolicy,
    timing: PassTiming,
    /// That the transport's kernels take from products, whether all the time or concurrently with a collective.
    workers: usize,
}

impl PassOverlap {
    /// One after the other.
    pub const SEQUENTIAL: Self =
        Self { policy: OverlapPolicy::SEQUENTIAL, timing: PassTiming::InSequence, workers: 0 };

    /// A way to run a policy where the transport's kernels take so many workers.
    pub(crate) fn new(policy: OverlapPolicy, rules: &LayerRules, workers: usize) -> Self {
        let timing = rules.timing;
        let way = Self { policy, timing, workers: if Self::by_groups(timing) { workers } else { 0 } };
        match rules.margin {
            LayerMargin::Nothing => way,
            LayerMargin::Collectives => way.leaving(workers),
            LayerMargin::Workers(workers) => way.leaving(workers),
        }
    }

    fn by_groups(timing: PassTiming) -> bool {
        matches!(timing, PassTiming::ByGroups(_))
    }

    fn leaving(self, workers: usize) -> Self {
        Self { policy: self.policy.leaving(workers), ..self }
    }

    /// The policy that has a pass run so.
    pub fn policy(&self) -> OverlapPolicy {
        self.policy
    }

    /// How its seconds are counted.
    pub fn timing(&self) -> PassTiming {
        self.timing
    }

    /// Workers of the transport's kernels while a product runs.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Whether nothing overlaps.
    pub fn is_sequential(&self) -> bool {
        !self.policy.overlaps()
    }

    /// Whether one kernel computes all groups, whose rows leave, or are waited for, group by group.
    pub fn is_one_kernel(&self) -> bool {
        matches!(self.timing, PassTiming::ByGroups(timing) if timing.starts == ProductStart::OneKernel)
    }

    /// Whether kernels send or take rows as they compute.
    pub fn is_fused(&self) -> bool {
        self.policy.is_fused()
    }

    /// Whether communication takes no multiprocessors but for sums.
    pub fn spares_workers(&self) -> bool {
        !self.is_sequential() && !Self::by_groups(self.timing)
    }

    /// Whether the transport's kernels take multiprocessors that products would have.
    pub fn takes_workers(&self) -> bool {
        self.workers > 0
    }

    /// The same with margins of these sizes, where products leave the transport's kernels workers all the time.
    pub fn with_margins(self, sizes: impl Fn(usize) -> Vec<usize>) -> Vec<Self> {
        match (Self::by_groups(self.timing), self.policy.sm_margin()) {
            (true, 1..) => {
                let sized = |workers| Self { workers, ..self }.leaving(workers);
                sizes(self.policy.sm_margin()).into_iter().map(sized).collect()
            }
            _ => vec![self],
        }
    }
}

impl From<PassOverlap> for OverlapPolicy {
    fn from(way: PassOverlap) -> Self {
        way.policy
    }
}
