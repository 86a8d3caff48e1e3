//! Which of the launchers of attention a device takes: those made for Hopper, or the portable ones.

use super::{
    AttentionBackward, AttentionForward, AttentionProblem, BackwardMode, BackwardTensors, Cast, ElementType,
    ForwardMode, ForwardTensors, MissedTurn, PortableBackward, PortableForward, Scalar,
};
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

/// dq to elements.
#[derive(Clone, Debug)]
pub struct Rounding {
    cast: Cast,
    elements: u64,
}

impl Rounding {
    fn new(setup: &Stream, problem: &AttentionProblem) -> Result<Self, CudaError> {
        let element = match problem.element {
            ElementType::Bf16 => Scalar::Bf16,
            ElementType::F16 => Scalar::F16,
        };
        Ok(Self {
            cast: Cast::new(setup.device(), Scalar::F32, element)?,
            elements: (problem.rows_q * problem.heads_q * problem.head_dim) as u64,
        })
    }
}

/// The backward on a device: a problem prepared to run many times.
#[derive(Clone, Debug)]
pub enum BackwardKernel {
    /// On Hopper.
    Hopper(Box<AttentionBackward>),
    /// Elsewhere, and for heads that the kernel for Hopper has no registers for; dq may be rounded by a pass of its own.
    Portable(Box<PortableBackward>, Option<Rounding>),
}

impl BackwardKernel {
    /// Makes a problem ready for the device of `setup`, which is waited for.
    ///
    /// # Errors
    /// As [`ForwardKernel::new`].
    pub fn new(setup: &Stream, problem: &AttentionProblem, mode: BackwardMode) -> Result<Self, CudaError> {
        if setup.device().arch().is_hopper() && AttentionBackward::takes(problem) {
            Ok(Self::Hopper(Box::new(AttentionBackward::new(setup, problem, mode)?)))
        } else {
            let rounding = mode.rounds_queries.then(|| Rounding::new(setup, problem)).transpose()?;
            Ok(Self::Portable(Box::new(PortableBackward::new(setup, problem, mode)?), rounding))
        }
    }

    /// See [`AttentionBackward::missed_turn`].
    pub fn missed_turn(&self) -> Option<MissedTurn> {
        match self {
            Self::Hopper(kernel) => kernel.missed_turn(),
            Self::Portable(..) => None,
        }
    }

    /// Enqueues the backward.
    ///
    /// # Safety
    /// As [`ForwardKernel::launch`].
    ///
    /// # Errors
    /// As [`ForwardKernel::launch`].
    pub unsafe fn launch(&self, stream: &Stream, tensors: &BackwardTensors) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Hopper(kernel) => kernel.launch(stream, tensors),
                Self::Portable(kernel, rounding) => {
                    kernel.launch(stream, tensors)?;
                    match (rounding, tensors.rounded_dq) {
                        (Some(Rounding { cast, elements }), Some(rounded)) => {
                            cast.launch(stream, tensors.dq, rounded, *elements)
                        }
                        _ => Ok(()),
                    }
                }
            }
        }
    }
}
