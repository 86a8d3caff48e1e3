//! The operations that ranks take part in together.

use std::sync::Arc;

use counterpoint_plan::{DType, GroupPart};
use serde::{Deserialize, Serialize};

use super::{Accumulate, BarrierId, BufferId, SignalId};

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

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Lse => "lse",
        })
    }
}

/// How a group-cast signals its rows as they come, to an operation that has begun before.
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

/// Rows to the ranks that need them. All ranks queue the same group collectives in the same order, whatever the stream;
/// the n-th of one rank's Program is matched with the n-th of every other's.
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
    /// Signals its rows as they come.
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
