//! Why checks could not begin.

use counterpoint_cuda::CudaError;
use counterpoint_exec::ExecError;

/// Why a group's checks could not begin.
pub(super) struct CannotBegin(pub(super) String);

impl From<CudaError> for CannotBegin {
    fn from(error: CudaError) -> Self {
        Self(error.to_string())
    }
}

impl From<ExecError> for CannotBegin {
    fn from(error: ExecError) -> Self {
        Self(error.to_string())
    }
}
