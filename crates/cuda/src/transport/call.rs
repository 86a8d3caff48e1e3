//! A call of a collective, and why it cannot be enqueued.

use counterpoint_exec::{CollectiveCall, ExecError};

use super::CudaCollective;
use crate::backend::CudaBackend;
use crate::{CallFault, CudaError};

pub(super) type Call<'a> = CollectiveCall<'a, CudaBackend, CudaCollective>;

/// Addresses of a call's tensors.
pub(super) fn addresses(call: &Call<'_>) -> (Vec<u64>, Vec<u64>) {
    let tensors = call.collective.collective.tensors.iter();
    tensors.map(|(input, output)| (call.buffers[input.0].address(), call.buffers[output.0].address())).unzip()
}

/// The error of a rank that has not published where its memory is: nothing may be enqueued then.
pub(super) fn unpublished(rank: usize) -> CallError {
    let reason = CallFault::Unpublished { rank }.into();
    CallError::Cuda(CudaError::Launch { kernel: "a product whose rows travel".to_owned(), reason })
}

/// Why a collective cannot be enqueued.
pub(super) enum CallError {
    Exec(ExecError),
    Cuda(CudaError),
}

impl From<ExecError> for CallError {
    fn from(error: ExecError) -> Self {
        Self::Exec(error)
    }
}

impl From<CudaError> for CallError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}
