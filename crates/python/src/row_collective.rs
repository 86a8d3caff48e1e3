//! Collectives over the rows of a dispatched tensor.

use counterpoint_exec::{CollectiveSpec, GroupCollective, Reduce, TensorPair};
use counterpoint_mask::Range;
use counterpoint_plan::{Dispatch, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{Accumulate, ReduceOp};

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
pub(crate) fn row_collective(
    rank: usize,
    dispatch: &Dispatch,
    what: RowCollective,
    from: &Borrowed,
    to: &Borrowed,
) -> CollectiveSpec {
    let dtype = from.dtype;
    let (label, part, what) = match what {
        RowCollective::Gather => ("gather rows", gather_part(dispatch, rank), GroupCollective::Cast(dtype)),
        RowCollective::Roll(shift) => {
            ("roll rows", dispatch.roll_part(rank, shift), GroupCollective::Cast(dtype))
        }
        RowCollective::ReduceScatter => {
            let (op, accumulate, reduce_dtype) = (ReduceOp::Sum, Accumulate::Start, dtype.accumulator());
            let reduce = Reduce { op, accumulate, wire_dtype: dtype, reduce_dtype };
            ("sum rows", gather_part(dispatch, rank), GroupCollective::Reduce(reduce))
        }
    };
    let pair = TensorPair { input: (from.shape.clone(), dtype), output: (to.shape.clone(), dtype) };
    CollectiveSpec { label: label.to_owned(), part, what, tensors: vec![pair] }
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
