//! The tensors of a run: read from a file, or drawn at random by `random_inputs`; checked before anything is computed.

mod header;
mod non_finite;
mod shape;
mod tensor_file;

pub use counterpoint_exec::{random_inputs, random_rows};
pub use non_finite::refuse_non_finite;
pub use shape::{Problem, flags_divide};
pub use tensor_file::{FileState, TensorFile};
