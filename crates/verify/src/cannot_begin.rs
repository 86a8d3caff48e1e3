//! Why checks could not begin.

use std::io;

use counterpoint_cuda::CudaError;
use counterpoint_exec::ExecError;
use thiserror::Error;

/// Why a group's checks could not begin.
#[derive(Debug, Error)]
pub(super) enum CannotBegin {
    /// The GPU, or what it takes to use it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The ranks.
    #[error(transparent)]
    Ranks(#[from] ExecError),
    /// There is no folder for files of jobs.
    #[error("no folder: {0}; set TMPDIR")]
    NoFolder(io::Error),
    /// Two families of kernels cannot be compared.
    #[error("it has one family")]
    OneFamily,
    /// The GPU has no kernels but the portable ones.
    #[error("it has no other kernels")]
    NoOtherKernels,
}
