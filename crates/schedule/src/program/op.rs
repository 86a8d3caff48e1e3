//! Every operation that a rank can perform.

use std::sync::Arc;

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use super::{
    AttentionBackward, AttentionDelta, AttentionFinish, AttentionForward, BackwardReduce, BarrierId,
    BufferId, CastGemm, ColumnMax, ColumnSum, EventId, Gemm, GemmReduce, GroupCast, GroupReduce, RmsNorm,
    RmsNormBackward, SignalId, UserKernel, WaveGemm,
};
use crate::Mover;

/// What one operation does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Op {
    /// A stage of the attention forward.
    AttentionForward(AttentionForward),
    /// The results of rows whose shares are merged.
    AttentionFinish(AttentionFinish),
    /// The row statistic of the backward.
    AttentionDelta(AttentionDelta),
    /// A stage of the attention backward.
    AttentionBackward(AttentionBackward),
    /// A stage of the attention backward whose gradients of keys are summed over ranks.
    BackwardReduce(Box<BackwardReduce>),
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
    /// A matrix product that is reduced over ranks while it is computed.
    GemmReduce(Box<GemmReduce>),
    /// A matrix product whose operand's rows come from other ranks while it is computed.
    CastGemm(Box<CastGemm>),
    /// Rows to the ranks that need them.
    GroupCast(GroupCast),
    /// Partial results back to their owners.
    GroupReduce(GroupReduce),
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
        /// Arrivals wanted.
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
        match (mover, self) {
            (Mover::CopyEngine, _) => true,
            // What is told of rows as they are delivered may hold all workers while it waits for them.
            (Mover::Fused, Self::GroupCast(cast)) => cast.delivery.is_none(),
            (Mover::Transport | Mover::Fused, _) => false,
        }
    }

    /// The stage of the attention backward that the operation is, or begins with.
    pub fn backward(&self) -> Option<&AttentionBackward> {
        match self {
            Op::AttentionBackward(op) => Some(op),
            Op::BackwardReduce(both) => Some(&both.backward),
            _ => None,
        }
    }

    /// Whether rows travel between ranks in it.
    pub fn is_collective(&self) -> bool {
        match self {
            Op::GroupCast(_)
            | Op::GroupReduce(_)
            | Op::BackwardReduce(_)
            | Op::GemmReduce(_)
            | Op::CastGemm(_) => true,
            Op::AttentionForward(_)
            | Op::AttentionFinish(_)
            | Op::AttentionDelta(_)
            | Op::AttentionBackward(_)
            | Op::PlaceRows { .. }
            | Op::Gemm(_)
            | Op::WaveGemm(_)
            | Op::ColumnSum(_)
            | Op::ColumnMax(_)
            | Op::RmsNorm(_)
            | Op::RmsNormBackward(_)
            | Op::UserKernel(_)
            | Op::Cast { .. }
            | Op::Concat { .. }
            | Op::CopyRows { .. }
            | Op::ZeroRows { .. }
            | Op::Record(_)
            | Op::Wait(_)
            | Op::Await { .. }
            | Op::Signal { .. }
            | Op::WaitSignal { .. } => false,
        }
    }

    /// Of an operation that others may see finished part by part, its signal and its parts.
    pub fn raises(&self) -> Option<(SignalId, usize)> {
        match self {
            Op::WaveGemm(op) => Some((op.signal, op.groups.len())),
            Op::UserKernel(op) => op.signal.map(|signal| (signal, op.parts.len())),
            _ => None,
        }
    }
}
