//! Which of the launchers of attention a device takes.

use super::{AttentionForward, AttentionProblem, ForwardMode, ForwardTensors};
use crate::{CudaError, Stream};

/// The forward on a device: a problem prepared to run many times.
#[derive(Clone, Debug)]
pub struct ForwardKernel(Box<AttentionForward>);

impl ForwardKernel {
    /// Makes a problem ready for the device of `setup`, which is waited for.
    ///
    /// # Errors
    /// When the problem is not one that the kernels take; when one cannot be compiled, or memory is short.
    pub fn new(setup: &Stream, problem: &AttentionProblem, mode: ForwardMode) -> Result<Self, CudaError> {
        Ok(Self(Box::new(AttentionForward::new(setup, problem, mode)?)))
    }

    /// Enqueues the forward.
    ///
    /// # Safety
    /// `tensors` are what [`ForwardTensors`] says, of this value's problem; they, and this value, live until the kernel has run.
    ///
    /// # Errors
    /// When the tensors are not those of the mode; the driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(stream, tensors) }
    }
}
