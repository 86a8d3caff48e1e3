//! What is wrong with a safetensors file, and with a tensor of it.

use safetensors::{Dtype, SafeTensorError};
use thiserror::Error;

/// Why a file cannot be read as safetensors.
#[derive(Debug, Error)]
pub enum FileFault {
    /// It is too short to have a header.
    #[error("it has {bytes} bytes, less than the 8 of a header's length")]
    Short {
        /// Its bytes.
        bytes: u64,
    },
    /// Its header does not fit into it.
    #[error("its first 8 bytes announce a header of {header} bytes in a file of {bytes}")]
    HeaderLength {
        /// Bytes of the header, as announced.
        header: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// It ends before its last tensor does.
    #[error("it is truncated, with {bytes} bytes where its header announces {announced}")]
    Truncated {
        /// Its bytes.
        bytes: u64,
        /// Those of its header and its tensors.
        announced: u64,
    },
    /// It goes on behind its last tensor.
    #[error("it is too long, with {bytes} bytes where its header announces {announced}")]
    TooLong {
        /// Its bytes.
        bytes: u64,
        /// Those of its header and its tensors.
        announced: u64,
    },
    /// Its header is something else.
    #[error("its header is not a JSON object of tensors by name")]
    NoObject,
    /// Its header is no JSON, or not of the form.
    #[error("its header cannot be read: {0}")]
    Header(serde_json::Error),
    /// Its header says of a tensor what cannot be.
    #[error("in its header, tensor `{name}` {reason}")]
    Entry {
        /// The tensor.
        name: String,
        /// What is wrong.
        reason: EntryFault,
    },
    /// Its header has a name twice.
    #[error("its header has two tensors `{name}`")]
    Twice {
        /// The name.
        name: String,
    },
    /// Its tensors do not follow each other.
    #[error("its header cannot be right: {0}, where tensors must lie without gaps")]
    Gaps(SafeTensorError),
}

/// What a header says of a tensor that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EntryFault {
    /// A type in small letters.
    #[error("is of type `{name}`, which is written `{written}`")]
    Case {
        /// The type as it stands there.
        name: String,
        /// As it is written.
        written: String,
    },
    /// No type.
    #[error("is of type `{name}`, which the format does not know; attention takes F64, F32, BF16 and F16")]
    Type {
        /// The type as it stands there.
        name: String,
    },
    /// It ends before it begins.
    #[error("has its bytes at [{begin}, {end}], which ends before it begins")]
    Offsets {
        /// Its first byte.
        begin: usize,
        /// The one behind its last.
        end: usize,
    },
    /// Its elements cannot be counted.
    #[error("has the shape {shape:?}, which is more than a computer can hold")]
    Shape {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Its bytes are not those of its shape.
    #[error("has {bytes} bytes, but its shape {shape:?} of {dtype} takes {}", *bits as f64 / 8.0)]
    Bytes {
        /// Its bytes.
        bytes: usize,
        /// Its shape.
        shape: Vec<usize>,
        /// Its type.
        dtype: Dtype,
        /// Bits that these take.
        bits: usize,
    },
}

/// Why a tensor is not one of the attention problem.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InputFault {
    /// Its type.
    #[error("is of type {dtype}, which attention does not take; convert it to F64, F32, BF16 or F16")]
    Type {
        /// Its type.
        dtype: Dtype,
    },
    /// Another type than the queries'.
    #[error("is {dtype} but `q` is {queries}; give both one type")]
    UnlikeQueries {
        /// Its type.
        dtype: Dtype,
        /// The queries'.
        queries: Dtype,
    },
    /// The type of a sink.
    #[error("is {dtype} with {queries} tensors; give it in F32 (or F64 with F64 tensors)")]
    SinkType {
        /// Its type.
        dtype: Dtype,
        /// The queries'.
        queries: Dtype,
    },
    /// The number of its axes.
    #[error("has {} dimensions, {shape:?}; it must have {}, [{}]", shape.len(), axes.len(), axes.join(", "))]
    Axes {
        /// Its shape.
        shape: Vec<usize>,
        /// The axes that it must have.
        axes: &'static [&'static str],
    },
    /// Nothing along an axis.
    #[error("has {axis} 0 in its shape {shape:?}; it must be at least 1")]
    Empty {
        /// The axis.
        axis: &'static str,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Another length of an axis.
    #[error("has {axis} {length} in its shape {shape:?}, but it must be {wanted} like {whose}")]
    Length {
        /// The axis.
        axis: &'static str,
        /// Its length.
        length: usize,
        /// Its shape.
        shape: Vec<usize>,
        /// The length that it must have.
        wanted: usize,
        /// What has that length, such as "those of `k`".
        whose: &'static str,
    },
}
