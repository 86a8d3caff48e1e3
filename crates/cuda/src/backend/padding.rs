//! Padded copies of heads whose size is no multiple of 8, for attention kernels that take no other.

use counterpoint_schedule::BufferSpec;

use crate::kernel::HeadResize;
use crate::{CudaError, DeviceBuffer, Stream};

/// Heads of attention kernels are a multiple of this many elements.
const MULTIPLE: usize = 8;

/// The number of elements that a head of `dim` has in a kernel.
pub(super) fn padded_dim(dim: usize) -> usize {
    dim.next_multiple_of(MULTIPLE)
}

/// A copy of a tensor `[rows, heads, dim]` whose heads are padded by zeros, for kernels that cannot take the tensor as it is.
#[derive(Debug)]
pub(super) struct Padding {
    copy: DeviceBuffer,
    resize: HeadResize,
    heads: u64,
    dim: u32,
    padded: u32,
}

impl Padding {
    /// The copy of a tensor like `spec`, where that needs one.
    pub(super) fn of(setup: &Stream, spec: &BufferSpec) -> Result<Option<Self>, CudaError> {
        let [rows, heads, dim] = spec.shape[..] else { return Ok(None) };
        let padded = padded_dim(dim);
        if padded == dim {
            return Ok(None);
        }
        let (heads, size) = (rows * heads, spec.dtype.size());
        Ok(Some(Self {
            copy: DeviceBuffer::new(setup.device(), heads * padded * size)?,
            resize: HeadResize::new(setup.device(), size as u64)?,
            heads: heads as u64,
            dim: dim as u32,
            padded: padded as u32,
        }))
    }

    pub(super) fn address(&self) -> u64 {
        self.copy.address()
    }

    /// Enqueues the copy of `tensor`, padded by zeros.
    pub(super) fn enter(&self, stream: &Stream, tensor: u64) -> Result<(), CudaError> {
        // SAFETY: the tensor and the copy have so many heads, by `of`; the Program orders who else uses the tensor.
        unsafe { self.resize.launch(stream, tensor, self.address(), self.heads, (self.dim, self.padded)) }
    }

    /// Enqueues the copy back into `tensor`, without the padding.
    pub(super) fn leave(&self, stream: &Stream, tensor: u64) -> Result<(), CudaError> {
        // SAFETY: as in `enter`.
        unsafe { self.resize.launch(stream, self.address(), tensor, self.heads, (self.padded, self.dim)) }
    }
}
