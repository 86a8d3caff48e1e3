//! Which of the launchers of attention a device takes: those made for Hopper, or the portable ones.

use super::{AttentionForward, AttentionProblem, ForwardMode, ForwardTensors, PortableForward};
use crate::{CudaError, Stream};

/// The forward on a device: a problem prepared to run many times.
#[derive(Clone, Debug)]
pub enum ForwardKernel {
    /// On Hopper.
    Hopper(Box<AttentionForward>),
    /// Elsewhere.
    Portable(Box<PortableForward>),
}

impl ForwardKernel {
    /// Makes a problem ready for the device of `setup`, which is waited for.
    ///
    /// # Errors
    /// When the problem is not one that the kernels take; when one cannot be compiled, or memory is short.
    pub fn new(setup: &Stream, problem: &AttentionProblem, mode: ForwardMode) -> Result<Self, CudaError> {
        if setup.device().arch().is_hopper() {
            Ok(Self::Hopper(Box::new(AttentionForward::new(setup, problem, mode)?)))
        } else {
            Ok(Self::Portable(Box::new(PortableForward::new(setup, problem, mode)?)))
        }
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
        unsafe {
            match self {
                Self::Hopper(kernel) => kernel.launch(stream, tensors),
                Self::Portable(kernel) => kernel.launch(stream, tensors),
            }
        }
    }
}
