//! Every operation that a rank can perform.

use std::slice;
use std::sync::Arc;

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use super::{
    AttentionBackward, AttentionDelta, AttentionFinish, AttentionForward, BarrierId, BufferId, ColumnMax,
    ColumnSum, EventId, Gemm, GroupCast, GroupReduce, RmsNorm, RmsNormBackward, RowArrivals, SignalId,
    UserKernel, WaveGemm,
};
use crate::{EngineCollectives, Mover};

/// What one operation does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Op {
    /// A stage of the attention forward.
    AttentionForward(AttentionForward),
    /// The results of rows whose partial results are merged.
    AttentionFinish(AttentionFinish),
    /// The row statistic of the backward.
    AttentionDelta(AttentionDelta),
    /// A stage of the attention backward.
    AttentionBackward(AttentionBackward),
    /// A matrix product.
    Gemm(Gemm),
    /// Matrix products that raise a signal one by one.
    WaveGemm(WaveGemm),
    /// A kernel of the user's own.
    UserKernel(UserKernel),
    /// Sums of columns.
    ColumnSum(ColumnSum),
    /// Largest elements of columns.
    ColumnMax(ColumnMax),
    /// Root mean square normalisation of rows.
    RmsNorm(RmsNorm),
    /// Its gradients.
    RmsNormBackward(RmsNormBackward),
    /// Rows to the ranks that need them.
    GroupCast(GroupCast),
    /// Partial results back to their owners.
    GroupReduce(GroupReduce),
    /// A computation with the collectives before or behind it, each of which takes what the one before has made:
    ///
    /// | parts | what it is |
    /// |---|---|
    /// | GEMM, group-reduce | a product whose rows are reduced where they belong while it is computed |
    /// | GEMM, group-reduce, group-cast | the same, and the sums go to all ranks that want them |
    /// | group-cast, GEMM | a product whose operand's rows come from other ranks while it is computed |
    /// | attention backward, group-reduce | a stage that does all work, and the sums of its `dk` and `dv` over ranks |
    ///
    /// A transport with a kernel for the parts runs them as one; nobody else looks at what passes between them, and it need not be written.
    /// In any case the results have the bits of the parts one after the other.
    Fused(Vec<Op>),
    /// Copies `src` to `dst`, converting the element type.
    Cast {
        /// Source.
        src: BufferId,
        /// Destination, of the same shape.
        dst: BufferId,
    },
    /// Copies whole buffers one after the other, along the rows, into `dst`.
    Concat {
        /// Sources, of one row shape and element type.
        srcs: Vec<BufferId>,
        /// Destination, with the rows of all of them.
        dst: BufferId,
    },
    /// Copies the rows of `src`, one after the other, to some rows of `dst`, converting the element type.
    PlaceRows {
        /// Source.
        src: BufferId,
        /// Destination, of the same row shape; rows that are not named stay as they are.
        dst: BufferId,
        /// The destination's rows, as many as `src` has: ascending, disjoint.
        rows: Arc<[Range]>,
    },
    /// Copies `src` to some columns of `dst`, whose other columns stay as they are.
    PlaceColumns {
        /// Source, with as many columns.
        src: BufferId,
        /// Destination, of as many rows and the same element type.
        dst: BufferId,
        /// The destination's columns.
        columns: Range,
    },
    /// Copies the first `rows` rows of `src` to the first rows of `dst`, whose other rows stay as they are.
    CopyRows {
        /// Source, of at least so many rows.
        src: BufferId,
        /// Destination, likewise, of the same row shape and element type.
        dst: BufferId,
        /// Number of rows.
        rows: usize,
    },
    /// Sets rows of `dst` to zero; its other rows stay as they are.
    ZeroRows {
        /// Destination.
        dst: BufferId,
        /// The rows.
        rows: Range,
    },
    /// Marks a point of this stream.
    Record(EventId),
    /// Goes on once the event has been recorded.
    Wait(EventId),
    /// Goes on once the barrier has counted so many arrivals since the run began.
    Await {
        /// The barrier.
        barrier: BarrierId,
        /// RowArrivals wanted.
        arrivals: u64,
    },
    /// Raises a signal to `value`, counted from the start of the run.
    Signal {
        /// The signal.
        signal: SignalId,
        /// Its new value.
        value: u64,
    },
    /// Goes on once the signal is at least `value`.
    WaitSignal {
        /// The signal.
        signal: SignalId,
        /// The value wanted.
        value: u64,
    },
}

impl Op {
    /// Whether it is a collective whose rows copy engines move under this choice, so that it takes no worker.
    pub(crate) fn is_left_to_engines(&self, mover: Mover) -> bool {
        match (mover.rules().engines, self) {
            (EngineCollectives::Everything, _) => true,
            (EngineCollectives::PlainCasts, Self::GroupCast(cast)) => cast.delivery.is_none(),
            (EngineCollectives::PlainCasts | EngineCollectives::Nothing, _) => false,
        }
    }

    /// Of a fused operation its parts, in their order; of any other the operation.
    pub fn parts(&self) -> &[Op] {
        match self {
            Op::Fused(parts) => parts,
            _ => slice::from_ref(self),
        }
    }

    /// Of a fused operation the part that computes; of any other the operation.
    pub fn computation(&self) -> &Op {
        self.parts().iter().find(|part| !part.is_collective()).unwrap_or(self)
    }

    /// The stage of the attention backward that the operation is, or has as a part.
    pub fn backward(&self) -> Option<&AttentionBackward> {
        match self.computation() {
            Op::AttentionBackward(op) => Some(op),
            _ => None,
        }
    }

    /// Whether it is a product whose rows travel while it is computed: it may hold all workers while it waits for other ranks.
    pub fn is_fused_gemm(&self) -> bool {
        matches!((self, self.computation()), (Op::Fused(_), Op::Gemm(_)))
    }

    /// Whether rows travel between ranks in it.
    pub fn is_collective(&self) -> bool {
        self.parts().iter().any(|part| matches!(part, Op::GroupCast(_) | Op::GroupReduce(_)))
    }

    /// Whether it computes, or has a part that does: it is neither a collective alone nor an order of others.
    pub fn is_computation(&self) -> bool {
        let is_order = |op: &Op| {
            matches!(
                op,
                Op::Record(_) | Op::Wait(_) | Op::Await { .. } | Op::Signal { .. } | Op::WaitSignal { .. }
            )
        };
        let computation = self.computation();
        !computation.is_collective() && !is_order(computation)
    }

    /// Of products that begin as their rows arrive, what says that they have.
    pub fn arrivals(&self) -> Option<&RowArrivals> {
        match self {
            Op::WaveGemm(op) => op.arrivals.as_ref(),
            _ => None,
        }
    }

    /// Parts that follow each other in it, where others see it finished part by part or it begins them one by one.
    pub(crate) fn steps(&self) -> Option<usize> {
        match self {
            Op::WaveGemm(op) => Some(op.groups.len()),
            _ => self.raises().map(|(_, parts)| parts),
        }
    }

    /// Of an operation that others may see finished part by part, its signal and its parts.
    pub fn raises(&self) -> Option<(SignalId, usize)> {
        match self {
            Op::WaveGemm(op) => op.signal.map(|signal| (signal, op.groups.len())),
            Op::UserKernel(op) => op.signal.map(|signal| (signal, op.parts.len())),
            _ => None,
        }
    }
}
