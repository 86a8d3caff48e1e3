//! A plan lowered to one [`Program`] per rank: a small set of operations on named streams.
//!
//! Pure: no device, clock, environment or file. The interpreter of `counterpoint-exec` runs a Program, [`simulate`]
//! predicts it, and both speak of it as a [`Timeline`].

mod attention;
mod policy;
mod program;
mod simulate;
mod timeline;

pub use attention::{lower_attention_backward, lower_attention_forward};
pub use policy::{OverlapPolicy, StartOrder};
pub use program::{
    Accumulate, AttentionBackward, AttentionDelta, AttentionFinish, AttentionForward, BarrierId, BufferId, BufferRole,
    BufferSpec, EventId, GroupCast, GroupReduce, Op, Program, ProgramOp, ReduceOp, SignalId, StreamId, StreamKind,
    StreamSpec,
};
pub use simulate::simulate;
pub use timeline::{Span, SpanKind, Timeline};
