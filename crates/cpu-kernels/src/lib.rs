//! The CPU's kernels: plain functions over slices, run on the threads that they are given, and the tensors in host memory that they
//! read and write.
//!
//! Kernels are compiled here for every element type ([`KernelElement`]) and optimised; crates that call them compile none of them again.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod addition_order;
mod attention_backward;
mod attention_delta;
mod attention_finish;
mod attention_forward;
mod cast;
pub mod convert;
mod element;
mod exponential;
mod gemm;
mod instances;
mod key_rows;
mod matmul;
mod normalise;
mod poison;
mod queue;
mod random;
mod real;
pub mod reduce;
mod rms_norm;
mod rms_norm_backward;
mod score;
mod shape;
mod square_product;
mod tensor;
mod tile;

pub use attention_backward::BackwardArgs;
pub use attention_delta::{DeltaArgs, SinkArgs};
pub use attention_finish::FinishArgs;
pub use attention_forward::{ForwardArgs, ForwardMode, ResultArgs, StateArgs, StateMutArgs};
pub use cast::{cast, cast_rows};
pub use element::{Accumulator, HostData, HostElement, convert_element};
pub use gemm::{GemmArgs, column_max};
pub use instances::{
    KernelElement, KernelResult, attention_backward, attention_backward_arriving, attention_delta,
    attention_finish, attention_forward, attention_forward_arriving, attention_partial, column_sum, gemm,
    rms_norm, rms_norm_backward,
};
pub use key_rows::TakeKeys;
pub use random::{random_parts, random_stream, random_tensor};
pub use real::{Element, Real};
pub use rms_norm::RmsNormArgs;
pub use rms_norm_backward::RmsNormBackwardArgs;
pub use shape::HeadShape;
pub use square_product::square_product;
pub use tensor::{HostTensor, TensorMut, TensorRef};
