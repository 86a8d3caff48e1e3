//! What is wrong with a rank's part in a group collective, with two ranks' parts, and with a collective in a graph.

use counterpoint_plan::{DType, GroupPartError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::WireTensor;

/// What is wrong with a rank's own part in a group collective, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum CollectiveFault {
    /// Its splits.
    #[error(transparent)]
    Part(#[from] GroupPartError),
    /// One buffer for two results.
    #[error("`{name}` is an output twice")]
    OutputTwice {
        /// Name of the buffer.
        name: String,
    },
    /// One buffer for an operand and a result.
    #[error("`{name}` is both input and output; receive into another buffer")]
    InputIsOutput {
        /// Name of the buffer.
        name: String,
    },
    /// A tensor without axes.
    #[error("a tensor has no row axis")]
    NoRowAxis,
    /// Rows of an input are no rows of its output.
    #[error("rows of `{input}` are {input_row:?} and rows of `{output}` are {output_row:?}; they must agree")]
    Rows {
        /// Name of the input.
        input: String,
        /// Shape of one of its rows.
        input_row: Vec<usize>,
        /// Name of the output.
        output: String,
        /// Shape of one of its rows.
        output_row: Vec<usize>,
    },
    /// A group-cast into another element type.
    #[error(
        "`{input}` is {input_dtype} and `{output}` is {output_dtype}; a group-cast keeps the element type"
    )]
    CastDType {
        /// Name of the input.
        input: String,
        /// Its element type.
        input_dtype: DType,
        /// Name of the output.
        output: String,
        /// Its element type.
        output_dtype: DType,
    },
    /// An output of attention without its logarithms.
    #[error("{tensors} tensors do not form (out, lse) pairs; pass out, then its lse")]
    LseCount {
        /// Tensors given.
        tensors: usize,
    },
    /// Two tensors that are not an output of attention and its logarithms.
    #[error(
        "`{out}` {out_shape:?} and `{lse}` {lse_shape:?} are not an (out, lse) pair; lse has the shape of out without its last axis"
    )]
    LsePair {
        /// Name of the first.
        out: String,
        /// Its shape.
        out_shape: Vec<usize>,
        /// Name of the second.
        lse: String,
        /// Its shape.
        lse_shape: Vec<usize>,
    },
    /// A world of other ranks than have joined.
    #[error(
        "its world has {expected} ranks and {joined} have joined; start as many processes as it has ranks"
    )]
    WorldSize {
        /// Ranks of the world.
        expected: usize,
        /// Ranks that have joined.
        joined: usize,
    },
    /// Logarithms of another type than GPUs merge.
    #[error("the logarithms `{name}` must be F32 on CUDA")]
    LseDType {
        /// Name of the buffer.
        name: String,
    },
    /// An element type that GPUs do not convert.
    #[error("CUDA converts and combines bf16, f16 and f32, not {dtype}")]
    CudaDType {
        /// The type.
        dtype: DType,
    },
    /// A rank uses copy engines where another does not.
    #[error("rank {rank} has not published where its outputs are")]
    UnpublishedOutputs {
        /// The other.
        rank: usize,
    },
}

/// How two ranks' parts in one group collective differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum CollectiveDifference {
    /// Their tensors.
    #[error("tensors are {} on rank {rank} and {} on rank {peer}", tensors_text(own), tensors_text(other))]
    Tensors {
        /// The rank that found it.
        rank: usize,
        /// Its tensors.
        own: Vec<WireTensor>,
        /// The other rank.
        peer: usize,
        /// Its tensors.
        other: Vec<WireTensor>,
    },
    /// Rows from one to the other.
    #[error("rank {sender} sends splits of {sent:?} rows and rank {receiver} expects {expected:?}")]
    Splits {
        /// Whose rows they are.
        sender: usize,
        /// Rows of each split.
        sent: Vec<usize>,
        /// Who receives them.
        receiver: usize,
        /// Rows that it expects.
        expected: Vec<usize>,
    },
    /// How often they made a plan ready.
    #[error(
        "it is ready for its first call as the {own}th of this rank, and as the {other}th of the other, which has dropped that one and \
         made it ready again; make a plan ready as often on all ranks"
    )]
    Preparations {
        /// Its number on the rank that found it.
        own: u64,
        /// Its number on the other.
        other: u64,
    },
}

/// What ranks send of the tensors of a collective.
fn tensors_text(tensors: &[WireTensor]) -> String {
    let text = |tensor: &WireTensor| {
        let WireTensor { row_elements, dtype, wire } = tensor;
        match dtype == wire {
            true => format!("{row_elements} x {dtype}"),
            false => format!("{row_elements} x {dtype} sent as {wire}"),
        }
    };
    if tensors.is_empty() {
        "none".to_owned()
    } else {
        tensors.iter().map(text).collect::<Vec<_>>().join(", ")
    }
}

/// Why a graph cannot hold calls of a collective, and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum CaptureFault {
    /// Its ranks wait for each other on the host.
    #[error("its ranks synchronise on the host in every call; call it outside of the graph")]
    HostSynchronises,
    /// What moves its rows has GPU ranks wait for each other on the host.
    #[error(
        "its ranks synchronise on the host in every call, because they share a GPU, copy engines alone move its rows (linear layers: \
         overlap=\"concurrent\" takes kernels), or it merges or rounds them; call it outside of the graph"
    )]
    HostMoves,
    /// Its rows go through NCCL.
    #[error(
        "NCCL moves its rows, whose calls have no limit when a graph is replayed; call it outside of the graph"
    )]
    Nccl,
    /// It is captured before its first call.
    #[error(
        "its ranks have not called it yet, and the first call synchronises on the host; call it once before"
    )]
    NotCalledYet,
}
