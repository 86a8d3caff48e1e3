//! The CPU kernels: plain functions over slices, run on the threads that they are given.

mod attention_backward;
mod attention_delta;
mod attention_finish;
mod attention_forward;
mod cast;
mod element;
mod exponential;
mod gemm;
mod key_rows;
mod matmul;
mod normalise;
mod poison;
mod queue;
mod rms_norm;
mod rms_norm_backward;
mod score;
mod shape;
mod square_product;
mod tile;
mod turns;

pub use attention_backward::{BackwardArgs, attention_backward, attention_backward_arriving};
pub use attention_delta::{DeltaArgs, SinkArgs, attention_delta};
pub(crate) use attention_finish::{FinishArgs, attention_finish, attention_share};
pub use attention_forward::{
    ForwardArgs, ForwardMode, ResultArgs, StateArgs, StateMutArgs, attention_forward,
    attention_forward_arriving,
};
pub use cast::cast;
pub use element::{Element, Real};
pub(crate) use gemm::column_sum;
pub use gemm::{GemmArgs, gemm};
pub use key_rows::TakeKeys;
pub(crate) use rms_norm::{RmsNormArgs, rms_norm};
pub(crate) use rms_norm_backward::{RmsNormBackwardArgs, rms_norm_backward};
pub use shape::HeadShape;
pub use square_product::square_product;
