//! Runs Programs: backends, transports, group collectives, the CPU kernels and the f64 reference.

mod attention;
mod error;
mod tensor;

pub use attention::{AttentionInputs, AttentionOutputs, AttentionRun, RunConfig, SlowLink, run_attention};
pub use error::ExecError;
pub use tensor::{HostData, HostTensor};
