//! Group-casts and group-reduces of rows: between the order of the whole sequence and that of ranks, and by splits of the caller's.

use std::sync::Arc;

use counterpoint_exec::{
    Backend, BufferAccess, CollectiveCalls, CollectiveSpec, DeviceFault, ExecError, Group, GroupCollective,
    Machine, Reduce, TensorPair, Ticket,
};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, Dispatch, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{Accumulate, ReduceOp};

use crate::borrow::{Borrowed, InPlace};
use crate::kept::Kept;
use crate::solution::Content;

/// A collective of rows as calls share it: all that its Programs depend on.
#[derive(Clone, PartialEq)]
pub(crate) struct RowsKey {
    pub(crate) pattern: RowPattern,
    pub(crate) action: RowAction,
    /// Of each tensor the shape of a row, and the type.
    pub(crate) tensors: Vec<(Vec<usize>, DType)>,
}

/// Which rows go where.
#[derive(Clone)]
pub(crate) enum RowPattern {
    /// The rows of all ranks to every rank, in global order, of queries or of keys.
    Whole { content: Arc<Content>, keys: bool },
    /// Every row by so many places along the sequence of queries.
    Rolled { content: Arc<Content>, shift: i64 },
    /// By splits of the caller's, of every rank here.
    Splits(Arc<Vec<GroupPart>>),
}

/// What becomes of rows that travel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowAction {
    /// They are copied.
    Cast,
    /// They are partial results, which are combined.
    Reduce(ReduceOp),
}

/// A call: pairs of an input and its output, which have the rows of the ranks here, one rank's after the other's.
pub(crate) struct RowsCall {
    pub(crate) key: RowsKey,
    /// PyTorch's current stream.
    pub(crate) stream: u64,
    pub(crate) pairs: Vec<(Borrowed, Borrowed)>,
}

/// What the engine does for rows.
pub(crate) trait RowEngine {
    /// Moves them: collective.
    fn call(&self, call: &RowsCall) -> Result<(), ExecError>;
}

/// A collective of rows that is ready on the ranks here.
pub(crate) struct ReadyRows<M: Machine> {
    calls: CollectiveCalls<M>,
    /// Of each rank here, those of inputs and of outputs.
    rows: Vec<[usize; 2]>,
    /// Whether it has been called: what its first call does is no work for a graph.
    is_known: bool,
}

/// Those of a group.
pub(crate) type KeptRows<M> = Kept<RowsKey, ReadyRows<M>>;

impl PartialEq for RowPattern {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Splits(one), Self::Splits(other)) => Arc::ptr_eq(one, other) || one == other,
            (Self::Whole { keys, .. }, Self::Whole { keys: others, .. }) if keys != others => false,
            (Self::Rolled { shift, .. }, Self::Rolled { shift: other, .. }) if shift != other => false,
            (Self::Whole { .. }, Self::Whole { .. }) | (Self::Rolled { .. }, Self::Rolled { .. }) => {
                self.dispatch() == other.dispatch()
            }
            _ => false,
        }
    }
}

impl RowPattern {
    fn dispatch(&self) -> Option<&Dispatch> {
        match self {
            Self::Whole { content, keys: true } => Some(&content.plan.k_dispatch),
            Self::Whole { content, keys: false } | Self::Rolled { content, .. } => {
                Some(&content.plan.q_dispatch)
            }
            Self::Splits(_) => None,
        }
    }

    /// Of a rank, the `index`-th here.
    fn part(&self, rank: usize, index: usize) -> GroupPart {
        match self {
            Self::Whole { content, keys: true } => whole_part(&content.plan.k_dispatch, rank),
            Self::Whole { content, keys: false } => whole_part(&content.plan.q_dispatch, rank),
            Self::Rolled { content, shift } => content.plan.q_dispatch.roll_part(rank, *shift),
            Self::Splits(parts) => parts.get(index).cloned().unwrap_or_default(),
        }
    }
}

/// Rows of a rank: its own, and those that it holds of others.
pub(crate) fn rows_of(part: &GroupPart) -> [usize; 2] {
    let end = |rows: Option<usize>| rows.unwrap_or(0);
    [
        end(part.owned.iter().map(|split| split.rows.end).max()),
        end(part.remote.iter().map(|split| split.rows.end).max()),
    ]
}

impl RowsKey {
    /// What one rank does, the `index`-th here, and how many rows its inputs and its outputs have.
    fn spec(&self, rank: usize, index: usize) -> (CollectiveSpec, [usize; 2]) {
        let part = self.pattern.part(rank, index);
        let [own, held] = rows_of(&part);
        let wire_dtype = self.tensors.first().map_or(DType::F32, |(_, dtype)| *dtype);
        let (what, rows) = match self.action {
            RowAction::Cast => (GroupCollective::Cast(wire_dtype), [own, held]),
            RowAction::Reduce(op) => {
                let (accumulate, reduce_dtype) = (Accumulate::Start, wire_dtype.accumulator());
                (GroupCollective::Reduce(Reduce { op, accumulate, wire_dtype, reduce_dtype }), [held, own])
            }
        };
        let tensors = self.tensors.iter().map(|(row, dtype)| {
            let of = |rows: usize| ([&[rows], row.as_slice()].concat(), *dtype);
            TensorPair { input: of(rows[0]), output: of(rows[1]) }
        });
        (CollectiveSpec { label: self.label(), part, what, tensors: tensors.collect() }, rows)
    }

    fn label(&self) -> String {
        let label = match (&self.pattern, self.action) {
            (RowPattern::Whole { .. }, RowAction::Cast) => "gather rows",
            (RowPattern::Whole { .. }, RowAction::Reduce(_)) => "sum rows",
            (RowPattern::Rolled { .. }, _) => "roll rows",
            (RowPattern::Splits(_), RowAction::Cast) => "group_cast",
            (RowPattern::Splits(_), RowAction::Reduce(_)) => "group_reduce",
        };
        label.to_owned()
    }
}

impl<M: Machine> ReadyRows<M> {
    /// Makes one ready: local.
    pub(crate) fn new(group: &Group<M>, key: &RowsKey) -> Result<Self, ExecError> {
        let here = group.ranks_here();
        let rows = here.clone().enumerate().map(|(index, rank)| key.spec(rank, index).1).collect();
        let calls = group.collective(|rank| key.spec(rank, rank - here.start).0)?;
        Ok(Self { calls, rows, is_known: false })
    }

    /// Refuses rows that have not been called yet where a graph of the caller captures the call.
    pub(crate) fn check_capture(group: &Group<M>, captures: bool) -> Result<(), ExecError> {
        if !captures || group.world_size() == 1 {
            return Ok(());
        }
        let (rank, place) = (group.ranks_here().start, "a capture".to_owned());
        Err(ExecError::Device { rank, place, reason: DeviceFault::CaptureBeforeRows })
    }

    /// Enqueues a call; `captures` says whether for a graph of the caller's.
    pub(crate) fn enqueue(
        &mut self,
        group: &Group<M>,
        pairs: &[(Borrowed, Borrowed)],
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
        captures: bool,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError>
    where
        M::Backend: InPlace,
    {
        if !self.is_known {
            Self::check_capture(group, captures)?;
        }
        let mut starts = [0; 2];
        let mut of_ranks = Vec::with_capacity(self.rows.len());
        for (rank, rows) in group.ranks().iter().zip(&self.rows) {
            let borrow = |name, tensor: &Borrowed, side: usize, access| {
                let rows = starts[side]..starts[side] + rows[side];
                rank.backend().borrow(name, tensor, rows, access)
            };
            let tensors = pairs.iter().map(|(from, to)| {
                Ok((borrow("from", from, 0, BufferAccess::Read)?, borrow("to", to, 1, BufferAccess::Write)?))
            });
            of_ranks.push(tensors.collect::<Result<Vec<_>, ExecError>>()?);
            starts = [starts[0] + rows[0], starts[1] + rows[1]];
        }
        let of_ranks: Vec<Vec<_>> =
            of_ranks.iter().map(|pairs| pairs.iter().map(|(from, to)| (from, to)).collect()).collect();
        let tickets = self.calls.call(&of_ranks.iter().map(Vec::as_slice).collect::<Vec<_>>(), streams)?;
        self.is_known = true;
        Ok(tickets)
    }
}

/// Every row to every rank, in global order; rows that a rank owns itself, too.
fn whole_part(dispatch: &Dispatch, rank: usize) -> GroupPart {
    let ranks: Vec<u32> = (0..dispatch.cp_size() as u32).collect();
    let mut start = 0;
    // The splits of two ranks match in order and in length, so rows are cut as they are laid down.
    let owned = dispatch.ranges(rank).into_iter().map(|rows| {
        start += rows.len();
        OwnedSplit { rows: Range::new(start - rows.len(), start), ranks: ranks.clone() }
    });
    let of_owner = |owner: u32| {
        let ranges = dispatch.ranges(owner as usize).into_iter();
        ranges.map(move |rows| RemoteSplit { rows, rank: owner })
    };
    GroupPart { owned: owned.collect(), remote: ranks.iter().copied().flat_map(of_owner).collect() }
}
