//! A rank's transports by the ranks that it reaches with them: one for all, or one inside its node and one between nodes.
//!
//! Whether two ranks share a node is the same question on both, so a collective falls into parts that each pair of ranks sees
//! alike. In a two-level exchange every collective lies on one level already; others are moved in two parts, one after the other,
//! and a sum then takes the partial sums of the node first.

use std::ops::Range;
use std::sync::Arc;

use counterpoint_exec::{CaptureFault, CollectiveCall, CollectiveContext, ExecError, OpPlace, Transport};
use counterpoint_plan::GroupPart;
use counterpoint_schedule::{Accumulate, GroupCast, GroupReduce, Op, Program, ReduceOp};

use super::{CudaCollective, CudaPending, CudaTransport};
use crate::backend::{CudaBackend, CudaBuffer, CudaTables};

/// Which ranks one transport reaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// All.
    World,
    /// Those of this rank's node, which are these.
    Node(Range<usize>),
    /// All others.
    OtherNodes(Range<usize>),
}

impl Level {
    /// Distinguishes its connections from those of the others.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::World => "of all",
            Self::Node(_) => "inside nodes",
            Self::OtherNodes(_) => "between nodes",
        }
    }

    fn has(&self, rank: usize) -> bool {
        match self {
            Self::World => true,
            Self::Node(node) => node.contains(&rank),
            Self::OtherNodes(node) => !node.contains(&rank),
        }
    }

    /// What of a part is shared with these.
    fn part_of(&self, part: &Arc<GroupPart>) -> Arc<GroupPart> {
        match self {
            Self::World => part.clone(),
            Self::Node(_) | Self::OtherNodes(_) => part.shared_with(|rank| self.has(rank)).into(),
        }
    }
}

/// One rank of the transport between processes.
pub struct LevelledTransport {
    /// One at least; what they reach makes the world.
    levels: Vec<(Level, CudaTransport)>,
}

/// A rank's part in a group collective, by level.
pub struct LevelledCollective(Vec<CudaCollective>);

/// A collective that is being enqueued, by level.
pub struct LevelledPending(Vec<CudaPending>);

impl LevelledTransport {
    pub(crate) fn new(levels: Vec<(Level, CudaTransport)>) -> Self {
        assert!(!levels.is_empty(), "a transport reaches somebody");
        Self { levels }
    }

    /// The transport that reaches all ranks, where one does: a product and its collective are one kernel on one level only.
    fn only(&self) -> Option<&CudaTransport> {
        match self.levels.as_slice() {
            [(Level::World, transport)] => Some(transport),
            _ => None,
        }
    }

    /// The calls of each level. The first one with rows of other ranks arrives at the barrier.
    fn calls<'a>(
        &'a self,
        call: &'a CollectiveCall<'a, CudaBackend, LevelledCollective>,
    ) -> impl Iterator<Item = (&'a CudaTransport, CollectiveCall<'a, CudaBackend, CudaCollective>)> {
        let CollectiveCall { backend, stream, place, collective, buffers, barrier, signal } = *call;
        let arriving = collective.0.iter().position(|part| part.has_peers(self.rank())).unwrap_or(0);
        self.levels.iter().zip(&collective.0).enumerate().map(move |(at, ((_, transport), collective))| {
            let barrier = barrier.filter(|_| at == arriving);
            let signal = signal.filter(|_| self.levels.len() == 1);
            (transport, CollectiveCall { backend, stream, place, collective, buffers, barrier, signal })
        })
    }
}

impl Transport<CudaBackend> for LevelledTransport {
    type Collective = LevelledCollective;
    type Pending = LevelledPending;

    fn rank(&self) -> usize {
        self.levels[0].1.rank()
    }

    fn world_size(&self) -> usize {
        self.levels[0].1.world_size()
    }

    fn prepare_cast(
        &self,
        place: &OpPlace,
        op: &GroupCast,
        context: &CollectiveContext<'_>,
    ) -> Result<LevelledCollective, ExecError> {
        let prepare = |(level, transport): &(Level, CudaTransport)| {
            let part = level.part_of(&op.part);
            transport.prepare_cast(place, &GroupCast { part, ..op.clone() }, context)
        };
        self.levels.iter().map(prepare).collect::<Result<_, _>>().map(LevelledCollective)
    }

    fn prepare_reduce(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        context: &CollectiveContext<'_>,
    ) -> Result<LevelledCollective, ExecError> {
        let mut of_levels = self.levels.iter().enumerate().map(|(at, (level, transport))| {
            let part = level.part_of(&op.part);
            let accumulate = if at == 0 { op.accumulate } else { Accumulate::Continue };
            (transport, GroupReduce { part, accumulate, ..op.clone() })
        });
        if op.op != ReduceOp::Avg || self.levels.len() == 1 {
            let prepared = of_levels.map(|(transport, op)| transport.prepare_reduce(place, &op, context));
            return prepared.collect::<Result<_, _>>().map(LevelledCollective);
        }
        let rows = op.tensors.first().map_or(0, |(_, result)| context.buffers[result.0].rows());
        let parts: Vec<Arc<GroupPart>> =
            self.levels.iter().map(|(level, _)| level.part_of(&op.part)).collect();
        let mut divisors = divisors(&parts, op.accumulate, rows).into_iter();
        let prepared = of_levels.by_ref().map(|(transport, op)| {
            transport.prepare_mean(place, &op, divisors.next().unwrap_or_default(), context)
        });
        prepared.collect::<Result<_, _>>().map(LevelledCollective)
    }

    fn prepare_fused(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        parts: &[Op],
        program: &Program,
        tables: &CudaTables,
    ) -> Result<Option<LevelledCollective>, ExecError> {
        let Some(transport) = self.only() else { return Ok(None) };
        let work = transport.prepare_fused(backend, place, parts, program, tables)?;
        Ok(work.map(|work| LevelledCollective(vec![work])))
    }

    fn publish_memory(
        &self,
        collective: &LevelledCollective,
        buffers: &[Option<CudaBuffer>],
    ) -> Result<(), ExecError> {
        let mut levels = self.levels.iter().zip(&collective.0);
        levels.try_for_each(|((_, transport), collective)| transport.publish_memory(collective, buffers))
    }

    fn can_be_captured(&self, collective: &LevelledCollective) -> Result<(), CaptureFault> {
        let mut levels = self.levels.iter().zip(&collective.0);
        levels.try_for_each(|((_, transport), collective)| transport.can_be_captured(collective))
    }

    fn announce(
        &self,
        call: &CollectiveCall<'_, CudaBackend, LevelledCollective>,
        between: u64,
    ) -> Result<(), ExecError> {
        self.calls(call).try_for_each(|(transport, call)| transport.announce(&call, between))
    }

    fn begin(
        &self,
        call: &CollectiveCall<'_, CudaBackend, LevelledCollective>,
    ) -> Result<LevelledPending, ExecError> {
        let begun = self.calls(call).map(|(transport, call)| transport.begin(&call));
        begun.collect::<Result<_, _>>().map(LevelledPending)
    }

    fn fetch(
        &self,
        call: &CollectiveCall<'_, CudaBackend, LevelledCollective>,
        pending: &mut LevelledPending,
    ) -> Result<(), ExecError> {
        let mut levels = self.calls(call).zip(&mut pending.0);
        levels.try_for_each(|((transport, call), pending)| transport.fetch(&call, pending))
    }

    fn end(
        &self,
        call: &CollectiveCall<'_, CudaBackend, LevelledCollective>,
        pending: LevelledPending,
    ) -> Result<(), ExecError> {
        let mut levels = self.calls(call).zip(pending.0);
        levels.try_for_each(|((transport, call), pending)| transport.end(&call, pending))?;
        // Rows of several levels are there when all are.
        let parts = call.collective.0.first().and_then(CudaCollective::delivery_parts);
        match call.signal.zip(parts).filter(|_| self.levels.len() > 1) {
            Some((signal, parts)) => signal
                .raise(call.stream.queue(), parts as u64)
                .map_err(|error| call.backend.error(call.place, error)),
            None => Ok(()),
        }
    }
}

/// By what a mean divides each row in each of its steps, of which these are the parts: by nothing before the last that brings the row
/// something, then by all that came and, where that counts, what was there.
fn divisors(parts: &[Arc<GroupPart>], accumulate: Accumulate, rows: usize) -> Vec<Vec<u32>> {
    let mut counts = vec![vec![0; rows]; parts.len()];
    for (counts, part) in counts.iter_mut().zip(parts) {
        for split in &part.owned {
            let end = split.rows.end.min(rows);
            counts[split.rows.start.min(end)..end]
                .iter_mut()
                .for_each(|count| *count += split.ranks.len() as u32);
        }
    }
    let mut divisors = vec![vec![1; rows]; parts.len()];
    for row in 0..rows {
        let own = u32::from(accumulate == Accumulate::Continue);
        let all = counts.iter().map(|counts| counts[row]).sum::<u32>() + own;
        if let Some(last) = counts.iter().rposition(|counts| counts[row] > 0) {
            divisors[last][row] = all;
        }
    }
    divisors
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;
    use counterpoint_plan::OwnedSplit;

    use super::*;

    #[test]
    fn a_mean_is_divided_once_where_all_of_a_row_has_come() {
        let part = |splits: &[(usize, usize, &[u32])]| {
            let split = |&(start, end, ranks): &(usize, usize, &[u32])| OwnedSplit {
                rows: Range::new(start, end),
                ranks: ranks.to_vec(),
            };
            Arc::new(GroupPart { owned: splits.iter().map(split).collect(), remote: Vec::new() })
        };
        let parts = [part(&[(0, 4, &[0, 1]), (4, 6, &[])]), part(&[(2, 5, &[5]), (3, 4, &[7, 9])])];
        let [node, others] = [vec![2, 2, 1, 1, 1, 1], vec![1, 1, 3, 5, 1, 1]];
        assert_eq!(divisors(&parts, Accumulate::Start, 6), [node, others]);
        let [node, others] = [vec![3, 3, 1, 1, 1, 1], vec![1, 1, 4, 6, 2, 1]];
        assert_eq!(divisors(&parts, Accumulate::Continue, 6), [node, others]);
    }

    /// Else a pair of ranks would wait for each other on different levels, or on two, or on none.
    #[test]
    fn every_pair_of_ranks_is_on_one_level_and_both_see_the_same() {
        let levels = |rank: usize| {
            let node = rank / 3 * 3..rank / 3 * 3 + 3;
            [Level::Node(node.clone()), Level::OtherNodes(node)]
        };
        let level_of = |rank: usize, peer: usize| {
            let has: Vec<usize> = (0..2).filter(|at| levels(rank)[*at].has(peer)).collect();
            assert_eq!(has.len(), 1, "{rank} and {peer}");
            has[0]
        };
        for (rank, peer) in (0..9).flat_map(|rank| (0..9).map(move |peer| (rank, peer))) {
            assert_eq!(level_of(rank, peer), level_of(peer, rank));
            assert!(Level::World.has(peer));
        }
        assert_eq!((level_of(4, 4), level_of(4, 3), level_of(4, 6)), (0, 0, 1));
    }
}
