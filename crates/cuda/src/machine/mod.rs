//! The GPUs that ranks run on: those of this process, or one of several processes. Here backends and transports are put together.

mod cost;
mod gpus;
mod lender;
mod process;

pub use gpus::CudaMachine;
pub use process::CudaProcess;
