//! What is wrong with the tensors of a computation.

use counterpoint_mask::Range;
use counterpoint_plan::DType;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What is wrong with the tensors of a computation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum OperandFault {
    /// The operation computes nothing.
    #[error("it is not a computation")]
    NotComputation,
    /// A buffer has another shape or element type.
    #[error("buffer `{name}` must be {dtype} {shape:?}, not {found_dtype} {found_shape:?}")]
    Layout {
        /// Name of the buffer.
        name: String,
        /// The element type that it must have.
        dtype: DType,
        /// The shape that it must have.
        shape: Vec<usize>,
        /// The element type that it has.
        found_dtype: DType,
        /// The shape that it has.
        found_shape: Vec<usize>,
    },
    /// A buffer has not the axes of an attention's tensor.
    #[error("buffer `{name}` must be [rows, heads, head_dim] with heads and elements, not {shape:?}")]
    NotHeads {
        /// Name of the buffer.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Query heads cannot be shared out over key heads.
    #[error("{heads_q} query heads are not a multiple of {heads_kv} key heads")]
    Heads {
        /// Query heads.
        heads_q: usize,
        /// Key heads.
        heads_kv: usize,
    },
    /// A stage goes on from a state elsewhere than where it leaves its own.
    #[error("a stage must continue a state in the same buffers")]
    OtherState,
    /// Sinks are of results.
    #[error("a partial result has no sink")]
    SinkOfPartial,
    /// Keys arrive behind rows that are no whole blocks.
    #[error("keys arrive after {rows} rows; that must be a multiple of {multiple}")]
    ArrivalsAfter {
        /// Rows that are there.
        rows: usize,
        /// Rows of a block.
        multiple: usize,
    },
    /// Rows arrive for other products than these, or for those of experts, which start once all are there.
    #[error(
        "rows arrive for {values} products, and it has {products}, which may not be those of a grouped GEMM"
    )]
    ArrivalsOfProducts {
        /// Products of which it says when their rows are there.
        values: usize,
        /// Products.
        products: usize,
    },
    /// A part of the mask lies outside of the tensors.
    #[error("queries {q} and keys {k} leave {q_rows} query rows and {key_rows} key rows")]
    BandOut {
        /// Its queries.
        q: Range,
        /// Its keys.
        k: Range,
        /// Query rows that there are.
        q_rows: usize,
        /// Key rows that there are.
        key_rows: usize,
    },
    /// A user's kernel computes nothing.
    #[error("it has no parts")]
    NoParts,
    /// A matrix has other axes than rows and columns.
    #[error("what was normalised has rows and columns, not {shape:?}")]
    NotRows {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Columns of which the largest elements are wanted are not there.
    #[error("there is no column of {from:?} for each of {to:?}")]
    TooFewColumns {
        /// The shape that has them.
        from: Vec<usize>,
        /// The shape that wants them.
        to: Vec<usize>,
    },
    /// A tensor with other axes, of which columns are meant.
    #[error("columns of {shape:?}, which has not rows and columns")]
    NoColumns {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Columns that are not there.
    #[error("columns {columns} of {has}")]
    ColumnsOut {
        /// The columns.
        columns: Range,
        /// Columns that there are.
        has: usize,
    },
    /// A copy of more rows than there are.
    #[error("{rows} rows are more than one of the tensors has")]
    TooManyRows {
        /// Rows to be copied.
        rows: usize,
    },
    /// An operand of no rows.
    #[error("operand {operand} has no rows")]
    NoRows {
        /// Which.
        operand: String,
    },
    /// Rows of an operand that are not there.
    #[error("{rows} of operand {operand} are not rows of `{name}`, which has {has}")]
    RowsBeyond {
        /// The rows.
        rows: Range,
        /// Which operand.
        operand: String,
        /// Name of the buffer.
        name: String,
        /// Rows that it has.
        has: usize,
    },
    /// The operands of a product differ in k or in their element type.
    #[error("a sums over {a} of {a_dtype} and b over {b} of {b_dtype}")]
    Inner {
        /// K of the first.
        a: usize,
        /// Its element type.
        a_dtype: DType,
        /// K of the second.
        b: usize,
        /// Its element type.
        b_dtype: DType,
    },
    /// Places of rows that do not ascend, or lie outside.
    #[error("{rows} do not follow row {end} of the result, or leave it")]
    PlacesOut {
        /// The places.
        rows: Range,
        /// The row behind those before.
        end: usize,
    },
    /// There is not a place for each row.
    #[error("there are {given} rows and places for {places}")]
    Places {
        /// Rows.
        given: usize,
        /// Places.
        places: usize,
    },
}
