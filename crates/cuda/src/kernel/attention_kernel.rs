//! Which of the launchers of attention a device takes: those made for Hopper, or the portable ones. And their tables, made without it.

use counterpoint_mask::Range;
use counterpoint_tiles::TileSchedule;
use serde::{Deserialize, Serialize};

use super::{
    AttentionBackward, AttentionForward, AttentionProblem, BackwardMode, BackwardTensors, CtaWaits,
    DqRounding, ForwardMode, ForwardTensors, HopperBackwardTables, HopperForwardTables, PortableBackward,
    PortableBackwardTables, PortableForward,
};
use crate::{Arch, CudaError, DescribedGpu, Stream};

/// What was searched for a forward: all that making it ready takes a while for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForwardTables {
    /// On Hopper.
    Hopper(Box<HopperForwardTables>),
    /// Elsewhere.
    Portable(Box<TileSchedule>),
}

impl ForwardTables {
    /// Those of a problem on a GPU. Pure.
    ///
    /// # Errors
    /// When the problem is not one that the GPU's kernel takes.
    pub fn new(gpu: &DescribedGpu, problem: &AttentionProblem, mode: ForwardMode) -> Result<Self, CudaError> {
        if gpu.arch.is_hopper() {
            Ok(Self::Hopper(Box::new(HopperForwardTables::new(gpu, problem, mode)?)))
        } else {
            Ok(Self::Portable(Box::new(PortableForward::tables(gpu, problem, mode)?)))
        }
    }
}

/// Likewise for a backward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BackwardTables {
    /// On Hopper.
    Hopper(Box<HopperBackwardTables>),
    /// Elsewhere, and for heads that the kernel for Hopper has no registers for.
    Portable(Box<PortableBackwardTables>),
}

impl BackwardTables {
    /// Those of a problem on a GPU. Pure.
    ///
    /// # Errors
    /// As [`ForwardTables::new`].
    pub fn new(
        gpu: &DescribedGpu,
        problem: &AttentionProblem,
        mode: BackwardMode,
    ) -> Result<Self, CudaError> {
        if gpu.arch.is_hopper() && AttentionBackward::takes(problem) {
            Ok(Self::Hopper(Box::new(HopperBackwardTables::new(gpu, problem, mode)?)))
        } else {
            Ok(Self::Portable(Box::new(PortableBackwardTables::new(gpu, problem)?)))
        }
    }
}

/// The forward on a device: a problem prepared to run many times.
#[derive(Clone, Debug)]
pub enum ForwardKernel {
    /// On Hopper.
    Hopper(Box<AttentionForward>),
    /// Elsewhere.
    Portable(Box<PortableForward>),
}

impl ForwardKernel {
    /// Makes a problem ready by its tables, which are for the device of `setup`; that is waited for.
    ///
    /// # Errors
    /// When a kernel cannot be compiled, or memory is short.
    pub fn new(
        setup: &Stream,
        problem: &AttentionProblem,
        mode: ForwardMode,
        tables: &ForwardTables,
    ) -> Result<Self, CudaError> {
        match tables {
            ForwardTables::Hopper(tables) => {
                Ok(Self::Hopper(Box::new(AttentionForward::new(setup, problem, mode, tables)?)))
            }
            ForwardTables::Portable(tables) => {
                Ok(Self::Portable(Box::new(PortableForward::new(setup, problem, mode, tables)?)))
            }
        }
    }

    /// Whether one made for such GPUs leaves partial results by itself ([`ForwardModeEnd::Partial`](super::ForwardModeEnd)); else they
    /// are made of a state.
    pub fn leaves_partials(arch: Arch) -> bool {
        arch.is_hopper()
    }

    /// What `row_max` of a state that it leaves is multiplied by to be that of base 2.
    pub fn max_scale(&self) -> f32 {
        match self {
            Self::Hopper(kernel) => kernel.max_scale(),
            Self::Portable(_) => 1.0,
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

/// The backward on a device: a problem prepared to run many times.
#[derive(Clone, Debug)]
pub enum BackwardKernel {
    /// On Hopper.
    Hopper(Box<AttentionBackward>),
    /// Elsewhere, and for heads that the kernel for Hopper has no registers for; dq may be rounded by a pass of its own.
    Portable(Box<PortableBackward>, Option<DqRounding>),
}

impl BackwardKernel {
    /// Makes a problem ready by its tables, which are for the device of `setup`; that is waited for.
    ///
    /// # Errors
    /// As [`ForwardKernel::new`].
    pub fn new(
        setup: &Stream,
        problem: &AttentionProblem,
        mode: BackwardMode,
        tables: &BackwardTables,
    ) -> Result<Self, CudaError> {
        match tables {
            BackwardTables::Hopper(tables) => {
                Ok(Self::Hopper(Box::new(AttentionBackward::new(setup, problem, mode, tables)?)))
            }
            BackwardTables::Portable(tables) => {
                let rounding = DqRounding::new(setup, problem, mode)?;
                Ok(Self::Portable(Box::new(PortableBackward::new(setup, problem, mode, tables)?), rounding))
            }
        }
    }

    /// See [`AttentionBackward::waits`].
    pub fn waits(&self) -> Option<&CtaWaits> {
        match self {
            Self::Hopper(kernel) => kernel.waits(),
            Self::Portable(..) => None,
        }
    }

    /// See [`AttentionBackward::round_alone`]; portable kernels round none.
    ///
    /// # Errors
    /// When memory is short.
    pub fn round_alone(&mut self, setup: &Stream, shared: &[Range]) -> Result<Vec<Range>, CudaError> {
        match self {
            Self::Hopper(kernel) => kernel.round_alone(setup, shared),
            Self::Portable(..) => Ok(Vec::new()),
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
                    rounding.as_ref().map_or(Ok(()), |rounding| rounding.launch(stream, tensors))
                }
            }
        }
    }
}
