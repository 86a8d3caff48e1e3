use std::sync::Arc;

use counterpoint_mask::{Band, Range};
use counterpoint_plan::{DType, GroupPart};
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

/// How a group-reduce combines partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Sum divided by the number of operands.
    Avg,
    /// Merge of (out, lse) pairs: tensors come in pairs, out `[rows, heads, dim]` then lse `[rows, heads]`.
    Lse,
}

/// The state of an online softmax between stages: for each (row, query head) the running maximum `row_max` of the scores,
/// `row_sum = sum exp(s - row_max)`, and `acc = sum exp(s - row_max) v`, all in the accumulator type. Carrying the state
/// itself, not a normalised result, keeps every bit of a deterministic run the same for any number of stages. An untouched
/// row has `row_max = -inf`, `row_sum = 0`, `acc = 0`.
///
/// `row_max` is in the backend's own unit: scores of base e on the CPU, of base 2 (scores times `log2 e`) on CUDA. So a
/// state is only ever read by the backend that wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionState {
    /// `[q_rows, heads_q, head_dim_v]`, accumulator type.
    pub acc: BufferId,
    /// `[q_rows, heads_q]`, accumulator type.
    pub row_max: BufferId,
    /// `[q_rows, heads_q]`, accumulator type.
    pub row_sum: BufferId,
}

impl AttentionState {
    /// Its buffers.
    pub fn buffers(&self) -> [BufferId; 3] {
        [self.acc, self.row_max, self.row_sum]
    }
}

/// What a stage of the forward goes on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForwardBegin {
    /// The empty state: this is the first stage with work.
    Start,
    /// What an earlier stage left.
    Continue(AttentionState),
}

/// What a stage of the forward leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForwardEnd {
    /// The state, for a later stage. A stage that continues a state leaves it in the same buffers.
    State(AttentionState),
    /// The results: `lse = row_max + ln(row_sum + sum_t exp(sink_t - row_max))`, `out = acc / that sum`. A row that saw
    /// nothing gets `out = 0` and `lse = -inf` (with a sink, logsumexp of it). Every element is written.
    Result {
        /// `[seqlen_sink, heads_q]`, accumulator type.
        sink: Option<BufferId>,
        /// `[q_rows, heads_q, head_dim_v]`: in the tensors' type, or in the accumulator type where it is a share that is
        /// merged with others.
        out: BufferId,
        /// `[q_rows, heads_q]`, accumulator type, natural logarithm.
        lse: BufferId,
    },
}

/// How a group-cast tells of its rows as they come, to an operation that has begun before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivery {
    /// Raised to `n` once the first `n` of `parts` even parts of the outputs' rows are there. It is this group-cast's alone.
    pub signal: SignalId,
    /// At least 1, the same on all ranks.
    pub parts: usize,
}

impl Delivery {
    /// The end of part `part`, one of `parts`, of `rows` rows.
    pub const fn end(part: usize, parts: usize, rows: usize) -> usize {
        rows * (part + 1) / parts
    }
}

/// Keys that come while an operation runs. It begins with work that needs none of them; rows of these buffers are read once
/// they have been delivered, as part of the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivingKeys {
    /// `[rows, heads_kv, head_dim]`: these rows come after those of `k`.
    pub k: BufferId,
    /// `[rows, heads_kv, head_dim_v]`, likewise.
    pub v: BufferId,
    /// That of the group-cast that brings them.
    pub delivery: Delivery,
}

/// One stage of the attention forward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionForward {
    /// `[q_rows, heads_q, head_dim]`.
    pub q: BufferId,
    /// `[key_rows, heads_kv, head_dim]`.
    pub k: BufferId,
    /// `[key_rows, heads_kv, head_dim_v]`.
    pub v: BufferId,
    /// More keys, which come while it runs; those of `k` are then a multiple of [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK)
    /// rows, and all work is in this stage.
    pub arriving: Option<ArrivingKeys>,
    /// What it goes on from.
    pub begin: ForwardBegin,
    /// What it leaves.
    pub end: ForwardEnd,
    /// The work, in rows of `q` and of all keys.
    pub bands: Arc<[Band]>,
    /// Factor on `q k^T`.
    pub scale: f64,
    /// 0 for none.
    pub softcap: f64,
}

/// The results of rows whose shares are merged: brings in the sink, which enters once a row, and rounds. Rows that it does not
/// name stay as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionFinish {
    /// `[rows, heads_q, head_dim_v]`, accumulator type: the merged shares, of keys alone.
    pub merged_out: BufferId,
    /// `[rows, heads_q]`, accumulator type, natural logarithm.
    pub merged_lse: BufferId,
    /// `[seqlen_sink, heads_q]`, accumulator type.
    pub sink: Option<BufferId>,
    /// Which rows of `out` and `lse` they are: ascending, disjoint.
    pub rows: Arc<[Range]>,
    /// `[q_rows, heads_q, head_dim_v]`, the tensors' type.
    pub out: BufferId,
    /// `[q_rows, heads_q]`, accumulator type.
    pub lse: BufferId,
}

/// `delta = rowsum(dout * out)`, and this rank's share of `dsink_t = -sum_rows exp(sink_t - lse) delta`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionDelta {
    /// `[q_rows, heads_q, head_dim_v]`.
    pub out: BufferId,
    /// As `out`.
    pub dout: BufferId,
    /// `[q_rows, heads_q]`, accumulator type.
    pub lse: BufferId,
    /// `[q_rows, heads_q]`, accumulator type; written.
    pub delta: BufferId,
    /// (`sink`, `dsink`), both `[seqlen_sink, heads_q]`, accumulator type; the second is written.
    pub sink: Option<(BufferId, BufferId)>,
}

/// One stage of the attention backward. `dk`, `dv` are begun and finished here; `dq` runs through all stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionBackward {
    /// `[q_rows, heads_q, head_dim]`.
    pub q: BufferId,
    /// `[key_rows, heads_kv, head_dim]`.
    pub k: BufferId,
    /// `[key_rows, heads_kv, head_dim_v]`.
    pub v: BufferId,
    /// As in [`AttentionForward::arriving`]; `dk` and `dv` have the rows of all keys.
    pub arriving: Option<ArrivingKeys>,
    /// `[q_rows, heads_q, head_dim_v]`.
    pub dout: BufferId,
    /// `[q_rows, heads_q]`, of the whole row, accumulator type.
    pub lse: BufferId,
    /// `[q_rows, heads_q]`, of the whole row, accumulator type.
    pub delta: BufferId,
    /// `[q_rows, heads_q, head_dim]`, accumulator type.
    pub dq: BufferId,
    /// As `dq`, in the tensors' type: where the last stage writes the sum rounded. Every element is written.
    pub rounded_dq: Option<BufferId>,
    /// `[key_rows, heads_kv, head_dim]`; every element is written. In the accumulator type where it is a share of a sum,
    /// in the tensors' type where it is the result.
    pub dk: BufferId,
    /// `[key_rows, heads_kv, head_dim_v]`, of the type of `dk`; every element is written.
    pub dv: BufferId,
    /// The work, in rows of `q` and of `k`.
    pub bands: Arc<[Band]>,
    /// Factor on `q k^T`.
    pub scale: f64,
    /// 0 for none.
    pub softcap: f64,
    /// Whether `dq` begins here or continues.
    pub accumulate_dq: Accumulate,
    /// Whether two runs must give the same bits, which on a GPU puts the sums of `dq` in a fixed order.
    pub deterministic: bool,
}

/// Rows to the ranks that need them. All ranks queue the same group collectives in the same order, whatever the stream;
/// the n-th of one rank's Program meets the n-th of every other's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupCast {
    /// This rank's part.
    pub part: Arc<GroupPart>,
    /// (input, output) tensors that travel together; the two of a pair have the same row shape and dtype.
    pub tensors: Vec<(BufferId, BufferId)>,
    /// Type on the wire.
    pub wire_dtype: DType,
    /// Arrives at this kernel barrier as soon as it has started.
    pub arrive: Option<BarrierId>,
    /// Tells of its rows as they come.
    pub delivery: Option<Delivery>,
}

/// Partial results back to their owners, reduced there: the partial results of one row are combined in the order of their
/// source ranks, whatever the order of the splits that name it. The owner's own contribution, under
/// [`Accumulate::Continue`], comes first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupReduce {
    /// This rank's part.
    pub part: Arc<GroupPart>,
    /// (partial results of remote rows, result for owned rows).
    pub tensors: Vec<(BufferId, BufferId)>,
    /// How partial results are combined.
    pub op: ReduceOp,
    /// Under `Start`, owned rows that no rank sends are set to the operation's identity; under `Continue` they are left
    /// alone.
    pub accumulate: Accumulate,
    /// Type on the wire.
    pub wire_dtype: DType,
    /// Type in which operands are combined.
    pub reduce_dtype: DType,
    /// Arrives at this kernel barrier as soon as it has started.
    pub arrive: Option<BarrierId>,
}

/// Some rows of a buffer `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowBlock {
    /// The buffer.
    pub buffer: BufferId,
    /// The rows, at least one.
    pub rows: Range,
}

/// How the operands of a [`Gemm`] lie, each row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmLayout {
    /// `a` is `[m, k]`, `b` is `[n, k]`: activations times a weight, the forward of a linear layer.
    Nt,
    /// `a` is `[m, k]`, `b` is `[k, n]`: gradients times a weight, the gradient of the input.
    Nn,
    /// `a` is `[k, m]`, `b` is `[k, n]`: gradients times activations, the gradient of the weight.
    Tn,
}

/// `out = a b`, summed in the accumulator type and rounded once. An operand is the rows of its blocks one after the other. An
/// element is summed over `k` in one order, whatever rows are computed together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// How the operands lie.
    pub layout: GemmLayout,
    /// The first operand.
    pub a: Vec<RowBlock>,
    /// The second operand.
    pub b: Vec<RowBlock>,
    /// `[rows, n]`.
    pub out: BufferId,
    /// Where the `m` rows of the result go: ascending, disjoint.
    pub out_rows: Vec<Range>,
    /// `[n]`, added to every row.
    pub bias: Option<BufferId>,
    /// Whether the product is written or added to what is there.
    pub accumulate: Accumulate,
}

/// A product whose rows are reduced where they belong while it is computed: `gemm`, then `reduce` of its result and, where all
/// ranks want the sums, `spread` of those. A transport with a kernel for it has rows leave as they are finished; the product's
/// result is not looked at by anyone else, and need not be written. In any case the results have the bits of the three operations
/// one after the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmReduce {
    /// The product.
    pub gemm: Gemm,
    /// What becomes of its result.
    pub reduce: GroupReduce,
    /// Sums to all ranks that want them.
    pub spread: Option<GroupCast>,
}

/// The products of a pass, group by group: they follow each other, and with the end of the n-th, counted from 1, `signal` is n. A
/// backend with a kernel for it computes all of them in one launch, which goes on while others use what it has finished. In any
/// case the results have the bits of the products one after the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WaveGemm {
    /// The products, which differ in their rows of the first operand and in where these go.
    pub groups: Vec<Gemm>,
    /// Raised by nothing else.
    pub signal: SignalId,
}

/// A kernel of the user's own, part by part: a part reads its buffers and writes others, parts follow each other, and with the end of the
/// n-th, counted from 1, `signal` is n. So what the kernel has made can travel while it goes on, as with [`WaveGemm`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UserKernel {
    /// The name under which backends were given it.
    pub kernel: String,
    /// The parts.
    pub parts: Vec<UserPart>,
    /// Raised by nothing else.
    pub signal: Option<SignalId>,
}

/// What one part of a [`UserKernel`] is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UserPart {
    /// Buffers that it reads.
    pub reads: Vec<BufferId>,
    /// Buffers that it writes, each element of them.
    pub writes: Vec<BufferId>,
}

/// A product whose operand's rows come from other ranks while it is computed: `cast`, then `gemm` of what it brings and of the
/// rank's own rows. A transport with a kernel for it begins with those, and goes on as rows come. In any case the result has the
/// bits of the two operations one after the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CastGemm {
    /// What brings the rows.
    pub cast: GroupCast,
    /// The product.
    pub gemm: Gemm,
}

/// RMSNorm of the rows of `src`, which are those of its blocks one after the other, with a residual in front of it: `h` is the rows, or
/// their sum with the residual, rounded, and `out = h / sqrt(mean of h's squares + epsilon) weight`, row by row. So rows that have
/// travelled in groups come into their order in the pass that is there anyway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// `[rows, columns]`.
    pub src: Vec<RowBlock>,
    /// Residual and where `h` goes, both `[rows, columns]`.
    pub residual: Option<(BufferId, BufferId)>,
    /// `[columns]`.
    pub weight: BufferId,
    /// What is added to the mean.
    pub epsilon: f64,
    /// `[rows, columns]`.
    pub out: BufferId,
}

/// The sum over the rows of `src`, which are those of its blocks one after the other: the gradient of a bias.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ColumnSum {
    /// `[rows, columns]`.
    pub src: Vec<RowBlock>,
    /// `[columns]`.
    pub dst: BufferId,
    /// Whether the sum is written or added to what is there.
    pub accumulate: Accumulate,
}

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
    /// A matrix product.
    Gemm(Gemm),
    /// Matrix products that raise a signal one by one.
    WaveGemm(WaveGemm),
    /// A kernel of the user's own.
    UserKernel(UserKernel),
    /// Sums of columns.
    ColumnSum(ColumnSum),
    /// Root mean square normalisation of rows.
    RmsNorm(RmsNorm),
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
    /// Of an operation that others may see finished part by part, its signal and its parts.
    pub fn raises(&self) -> Option<(SignalId, usize)> {
        match self {
            Op::WaveGemm(op) => Some((op.signal, op.groups.len())),
            Op::UserKernel(op) => op.signal.map(|signal| (signal, op.parts.len())),
            _ => None,
        }
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
    /// Slots: scratch buffers that take turns in one piece of memory, which is as long as the longest of them. A write of one
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
}
