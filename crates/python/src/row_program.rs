//! Programs of one collective over the rows of a dispatched tensor.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{Dispatch, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{
    Accumulate, BufferId, BufferRole, BufferSpec, GroupCast, GroupReduce, Op, OverlapPolicy, Program,
    ProgramOp, ReduceOp, StreamId, StreamKind, StreamSpec,
};

use crate::borrow::Borrowed;

/// A collective over rows of a dispatched tensor.
#[derive(Clone, Copy)]
pub(crate) enum RowCollective {
    /// Every rank gets the rows of all, in global order.
    Gather,
    /// Every rank gives all rows and gets the sums of its own.
    ReduceScatter,
    /// Rows move by so many places along the sequence.
    Roll(i64),
}

/// `what` on one rank, of the tensors `from` and `to`.
pub(crate) fn row_program(
    rank: usize,
    dispatch: &Dispatch,
    what: RowCollective,
    from: &Borrowed,
    to: &Borrowed,
) -> Program {
    let (dtype, tensors) = (from.dtype, vec![(BufferId(0), BufferId(1))]);
    let cast = |part| {
        let (part, tensors) = (Arc::new(part), tensors.clone());
        Op::GroupCast(GroupCast { part, tensors, wire_dtype: dtype, arrive: None, delivery: None })
    };
    let (label, op) = match what {
        RowCollective::Gather => ("gather rows", cast(gather_part(dispatch, rank))),
        RowCollective::Roll(shift) => ("roll rows", cast(dispatch.roll_part(rank, shift))),
        RowCollective::ReduceScatter => {
            let reduce = GroupReduce {
                part: Arc::new(gather_part(dispatch, rank)),
                tensors: tensors.clone(),
                op: ReduceOp::Sum,
                accumulate: Accumulate::Start,
                wire_dtype: dtype,
                reduce_dtype: dtype.accumulator(),
                arrive: None,
            };
            ("sum rows", Op::GroupReduce(reduce))
        }
    };
    let buffer = |name: &str, tensor: &Borrowed, role| BufferSpec {
        name: name.to_owned(),
        dtype,
        shape: tensor.shape.clone(),
        role,
    };
    Program {
        name: label.to_owned(),
        rank,
        world_size: dispatch.cp_size(),
        streams: vec![StreamSpec { name: "communication".to_owned(), kind: StreamKind::Communication }],
        buffers: vec![buffer("from", from, BufferRole::Input), buffer("to", to, BufferRole::Output)],
        slots: Vec::new(),
        num_events: 0,
        num_barriers: 0,
        num_signals: 0,
        policy: OverlapPolicy::default(),
        ops: vec![ProgramOp { stream: StreamId(0), stage: None, label: label.to_owned(), op }],
    }
}

/// Every row to every rank, in global order; rows that a rank owns itself, too.
fn gather_part(dispatch: &Dispatch, rank: usize) -> GroupPart {
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
