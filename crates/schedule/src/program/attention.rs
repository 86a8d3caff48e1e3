//! The operations of attention.

use std::sync::Arc;

use counterpoint_mask::{Band, Range};
use serde::{Deserialize, Serialize};

use super::{Accumulate, BufferId, Delivery};

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
        /// `[q_rows, heads_q, head_dim_v]`: in the tensors' type, or in the accumulator type where it is a partial result that is
        /// merged with others.
        out: BufferId,
        /// `[q_rows, heads_q]`, accumulator type, natural logarithm.
        lse: BufferId,
    },
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

/// Where a forward's blocks of keys begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyBlocks {
    /// Wherever suits the mask and the backend. Two runs of a Program have the same bits.
    #[default]
    Unaligned,
    /// At multiples of their size, which divides [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK): a row's results have the same bits
    /// for any number of stages.
    Aligned,
}

/// Where a stage of the forward leaves the largest score of each query head: of its pairs, and with [`Accumulate::Continue`] of what is
/// there. Scores are those that the softmax sees (scaled, capped), a sink's are not among them; minus infinity where no pair is unmasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxLogits {
    /// Accumulator type: `[heads_q]`, or one row of as many or more. What is more is minus infinity.
    pub buffer: BufferId,
    /// Whether they begin here.
    pub accumulate: Accumulate,
}

/// The largest element of each column. On NaN the result is not defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnMax {
    /// `[rows, columns]`, accumulator type, with a row at least.
    pub src: BufferId,
    /// `[columns]`, of the same type: of the first so many columns.
    pub dst: BufferId,
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
    /// Where its blocks of keys begin.
    pub blocks: KeyBlocks,
    /// What it goes on from.
    pub begin: ForwardBegin,
    /// What it leaves.
    pub end: ForwardEnd,
    /// Where the largest scores go, if they are wanted.
    pub max_logits: Option<MaxLogits>,
    /// The work, in rows of `q` and of all keys.
    pub bands: Arc<[Band]>,
    /// Factor on `q k^T`.
    pub scale: f64,
    /// 0 for none.
    pub softcap: f64,
}

/// The results of rows whose partial results are merged: brings in the sink, which enters once a row, and rounds. Rows that it does not
/// name stay as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionFinish {
    /// `[rows, heads_q, head_dim_v]`, accumulator type: the merged partial results, of keys alone.
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

/// `delta = rowsum(dout * out) - dlse`, and this rank's partial sum of `dsink_t = -sum_rows exp(sink_t - lse) delta`. A row that sees nothing
/// (`lse = -inf`) has no gradient of `lse`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionDelta {
    /// `[q_rows, heads_q, head_dim_v]`.
    pub out: BufferId,
    /// As `out`.
    pub dout: BufferId,
    /// `[q_rows, heads_q]`, accumulator type.
    pub lse: BufferId,
    /// `[q_rows, heads_q]`, accumulator type: the gradient of `lse`; 0 without it.
    pub dlse: Option<BufferId>,
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
    /// `[key_rows, heads_kv, head_dim]`; every element is written. In the accumulator type where it is a partial sum,
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
