//! dq to elements by a pass of its own, after kernels that do not round it themselves.

use super::{AttentionProblem, BackwardMode, BackwardTensors, Cast, ElementType, Scalar};
use crate::{CudaError, Stream};

/// The pass for a problem.
#[derive(Clone, Debug)]
pub struct DqRounding {
    cast: Cast,
    elements: u64,
}

impl DqRounding {
    /// The pass where the mode rounds dq, otherwise none.
    ///
    /// # Errors
    /// When its kernel cannot be compiled or loaded.
    pub fn new(
        setup: &Stream,
        problem: &AttentionProblem,
        mode: BackwardMode,
    ) -> Result<Option<Self>, CudaError> {
        if !mode.rounds_queries {
            return Ok(None);
        }
        let element = match problem.element {
            ElementType::Bf16 => Scalar::Bf16,
            ElementType::F16 => Scalar::F16,
        };
        Ok(Some(Self {
            cast: Cast::new(setup.device(), Scalar::F32, element)?,
            elements: (problem.rows_q * problem.heads_q * problem.head_dim) as u64,
        }))
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// As that of the backward's launch, which is before on the same stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &BackwardTensors) -> Result<(), CudaError> {
        match tensors.rounded_dq {
            // SAFETY: dq and what it is rounded to have so many elements, by the caller's promise.
            Some(rounded) => unsafe { self.cast.launch(stream, tensors.dq, rounded, self.elements) },
            None => Ok(()),
        }
    }
}
