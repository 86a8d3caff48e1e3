//! A Program: buffers, streams, and the operations of one rank in the order in which they are queued.

mod attention;
mod collective;
mod display;
mod grouped;
mod linear;
mod op;
mod op_display;
mod rows;
mod uses;

pub use attention::{
    ArrivingKeys, AttentionBackward, AttentionDelta, AttentionFinish, AttentionForward, AttentionState,
    ColumnMax, ForwardBegin, ForwardEnd, KeyBlocks, MaxLogits,
};
pub use collective::{Delivery, GroupCast, GroupReduce, ReduceOp};
pub use grouped::{GroupedLaunch, GroupedProblem, GroupedResults, GroupedRows};
pub use linear::{
    ColumnSum, ExpertRowsOf, Gemm, GemmLayout, RmsNorm, RmsNormBackward, RowArrivals, RowsOrigin, UserKernel,
    UserPart, WaveGemm,
};
pub use op::Op;
pub use rows::{RowBlock, RowBlocks, RowList, RowNumbers, RowPiece, RowRanges};

use counterpoint_plan::DType;
use serde::{Deserialize, Serialize};

use crate::OverlapPolicy;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub usize);
    };
}
id!(
    /// Index into [`Program::streams`].
    StreamId
);
id!(
    /// Index into [`Program::buffers`].
    BufferId
);
id!(
    /// An event of a Program, `0 .. num_events`. Recorded once in a run.
    EventId
);
id!(
    /// A kernel barrier of a Program, `0 .. num_barriers`.
    BarrierId
);
id!(
    /// A signal of a Program, `0 .. num_signals`: a counter that only grows.
    SignalId
);

/// What a stream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamKind {
    /// Computation.
    Compute,
    /// Communication.
    Communication,
}

/// A queue whose operations run in order; different streams run side by side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamSpec {
    /// Shown in traces.
    pub name: String,
    /// What it is for.
    pub kind: StreamKind,
}

/// Where a buffer's contents come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferRole {
    /// Given by the caller under the buffer's name; the Program only reads it.
    Input,
    /// Handed to the caller under the buffer's name; the Program writes every element.
    Output,
    /// Given by the caller under the buffer's name; the Program adds to it. What is added to it in a run that fails, nobody
    /// knows.
    Updated,
    /// Lives inside a run. Its contents before the first write are arbitrary.
    Scratch,
    /// Zeros before the first run, and then what the last run has left: for sums that whoever reads them last sets to zero again,
    /// where that is cheaper than to begin with it. Nobody runs the Program again after a run that failed.
    Persistent,
}

/// A dense row-major tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferSpec {
    /// Unique in the Program; inputs and outputs are bound by it.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape; the first axis is rows (tokens).
    pub shape: Vec<usize>,
    /// Where its contents come from and go to.
    pub role: BufferRole,
}

impl BufferSpec {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn row_elements(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        (self.rows() as u64) * (self.row_elements() as u64) * self.dtype.size() as u64
    }
}

/// Whether an operation begins its result or adds to what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accumulate {
    /// Write every element; what was there does not count.
    Start,
    /// Add to what is there.
    Continue,
}

impl std::fmt::Display for Accumulate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Accumulate::Start => "start",
            Accumulate::Continue => "continue",
        })
    }
}

/// One operation in its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramOp {
    /// The stream that it is queued on.
    pub stream: StreamId,
    /// The stage it belongs to.
    pub stage: Option<usize>,
    /// Shown in traces and errors, such as `cast kv`.
    pub label: String,
    /// What it does.
    pub op: Op,
}

/// Everything one rank does in one run, in the order in which it is queued. A producer (Record, arrival, Signal) is
/// always queued before whoever waits for it, so a Program is safe on any number of hardware queues.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Such as `attention forward`.
    pub name: String,
    /// The rank.
    pub rank: usize,
    /// Ranks that run together.
    pub world_size: usize,
    /// Streams.
    pub streams: Vec<StreamSpec>,
    /// Buffers.
    pub buffers: Vec<BufferSpec>,
    /// Slots: scratch buffers that share one piece of memory at different times, which is as long as the longest of them. A write of one
    /// ends what the others held; a buffer is in one slot at most.
    pub slots: Vec<Vec<BufferId>>,
    /// Number of events.
    pub num_events: usize,
    /// Number of kernel barriers.
    pub num_barriers: usize,
    /// Number of signals.
    pub num_signals: usize,
    /// What the backend is asked to do so that communication runs under computation.
    pub policy: OverlapPolicy,
    /// Operations in the order in which they are queued.
    pub ops: Vec<ProgramOp>,
}

impl Program {
    /// Bytes of the buffers whose role is `wanted`; those of a slot count once, as the longest of them.
    pub fn bytes(&self, wanted: impl Fn(BufferRole) -> bool) -> u64 {
        let mut alone = vec![true; self.buffers.len()];
        self.slots.iter().flatten().for_each(|id| alone[id.0] = false);
        let bytes = |spec: &BufferSpec| if wanted(spec.role) { spec.bytes() } else { 0 };
        let own = self.buffers.iter().zip(alone).filter(|(_, alone)| *alone).map(|(spec, _)| bytes(spec));
        let longest =
            |slot: &Vec<BufferId>| slot.iter().map(|id| bytes(&self.buffers[id.0])).max().unwrap_or(0);
        own.chain(self.slots.iter().map(longest)).fold(0, u64::saturating_add)
    }

    /// Whether a call of it may run concurrently with the calls before and after it, its streams shared with theirs, its scratch memory its
    /// own. Collectives of all calls follow each other on their streams, alike on all ranks. So nothing waits in a circle, unless a
    /// computation itself waits for other ranks while it holds all workers: another call's collective would then find none on one rank and
    /// run first on another. Nor may a run need what the one before leaves to it.
    pub fn overlaps_other_calls(&self) -> bool {
        let persists = |spec: &BufferSpec| spec.role == BufferRole::Persistent;
        let waits = |op: &Op| matches!(op, Op::Fused(_)) || op.arrivals().is_some();
        !self.ops.iter().any(|op| waits(&op.op)) && !self.buffers.iter().any(persists)
    }
}
