use std::sync::Arc;

use counterpoint_plan::DType;

use crate::{CudaError, DeviceBuffer};

/// A dense row-major tensor in a device's memory. Cloning it clones a handle.
#[derive(Clone, Debug)]
pub struct CudaBuffer {
    memory: DeviceBuffer,
    shape: Arc<[usize]>,
    dtype: DType,
}

impl CudaBuffer {
    /// A tensor of this shape and type in `memory`, which may be someone else's.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when the memory is shorter than the tensor, [`CudaError::Misaligned`] when it does not begin
    /// at a multiple of 16 bytes.
    pub fn new(memory: DeviceBuffer, shape: &[usize], dtype: DType) -> Result<Self, CudaError> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let memory = memory.slice(0..bytes)?;
        if !memory.address().is_multiple_of(16) {
            return Err(CudaError::Misaligned { address: memory.address() });
        }
        Ok(Self { memory, shape: shape.into(), dtype })
    }

    /// Its memory.
    pub fn memory(&self) -> &DeviceBuffer {
        &self.memory
    }

    /// The address of its first element.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Its shape; the first axis is rows (tokens).
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
