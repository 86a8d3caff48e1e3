//! Runs Programs: backends, transports, group collectives, the CPU kernels and the f64 reference.

mod attention;
mod check;
mod error;
pub mod kernel;
mod reference;
mod tensor;

pub use attention::{AttentionInputs, AttentionOutputs, AttentionRun, RunConfig, SlowLink, run_attention};
pub use check::{CheckReport, TensorCheck, check_attention, compare_with_reference};
pub use error::ExecError;
pub use reference::{
    NoiseNorms, Reference, ReferenceGradients, plain_attention, reference_attention, reference_bytes,
};
pub use tensor::{HostData, HostTensor};
