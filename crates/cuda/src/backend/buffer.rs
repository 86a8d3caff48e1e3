//! Tensors in a GPU's memory, dense or with strides of rows and heads, as Programs bind them.

use std::sync::Arc;

use counterpoint_plan::DType;

use crate::kernel::HeadRows;
use crate::{CudaError, DeviceBuffer, StrideFault};

/// A row-major tensor in a device's memory: dense, or with rows and heads that lie apart. Cloning it clones a handle.
#[derive(Clone, Debug)]
pub struct CudaBuffer {
    memory: DeviceBuffer,
    shape: Arc<[usize]>,
    dtype: DType,
    /// Elements from a row to the next and from a head to the next; `None` where it is dense.
    strides: Option<[usize; 2]>,
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
        Ok(Self { memory, shape: shape.into(), dtype, strides: None })
    }

    /// A tensor `[rows, heads, elements]` of which a row lies `strides[0]` elements behind the one before, and a head `strides[1]`: a part
    /// of a packed projection, or one with heads outside. The elements of a head lie side by side. `memory` begins with its first element.
    ///
    /// # Errors
    /// As [`CudaBuffer::new`]; [`CudaError::Strides`] for another number of axes, rows or heads that overlap, or a stride that is no multiple
    /// of 16 bytes.
    pub fn strided(
        memory: DeviceBuffer,
        shape: &[usize],
        dtype: DType,
        strides: [usize; 2],
    ) -> Result<Self, CudaError> {
        if shape.len() == 3 && (strides == [shape[1] * shape[2], shape[2]] || shape.contains(&0)) {
            return Self::new(memory, shape, dtype);
        }
        let bytes = Self::check_strides(shape, dtype, strides).map_err(|reason| CudaError::Strides {
            shape: shape.to_vec(),
            strides,
            reason,
        })?;
        let memory = memory.slice(0..bytes)?;
        if !memory.address().is_multiple_of(16) {
            return Err(CudaError::Misaligned { address: memory.address() });
        }
        Ok(Self { memory, shape: shape.into(), dtype, strides: Some(strides) })
    }

    /// The bytes from the first element to the last of a tensor that is not empty, or why there is none.
    fn check_strides(shape: &[usize], dtype: DType, strides: [usize; 2]) -> Result<usize, StrideFault> {
        let [rows, heads, elements] = *shape else {
            return Err(StrideFault::Axes { axes: shape.len() });
        };
        let [row, head] = strides;
        // The axis with the shorter stride lies inside of the other one.
        let (rows, heads) = ((rows, row), (heads, head));
        let ((count, stride), (outer, outer_stride)) =
            if head <= row { (heads, rows) } else { (rows, heads) };
        let extent = |count: usize, stride: usize, inside: usize| {
            (count - 1).checked_mul(stride).and_then(|last| last.checked_add(inside)).unwrap_or(usize::MAX)
        };
        let inside = extent(count, stride, elements);
        if (count > 1 && stride < elements) || (outer > 1 && outer_stride < inside) {
            return Err(StrideFault::Overlap);
        }
        if [row, head].iter().any(|stride| !stride.wrapping_mul(dtype.size()).is_multiple_of(16)) {
            return Err(StrideFault::Alignment);
        }
        Ok(extent(outer, outer_stride, inside).saturating_mul(dtype.size()))
    }

    /// Elements from a row to the next and from a head to the next; `None` where it is dense.
    pub fn strides(&self) -> Option<[usize; 2]> {
        self.strides
    }

    /// As kernels take it.
    pub(crate) fn head_rows(&self) -> HeadRows {
        let bytes = |[row, head]: [usize; 2]| [head, row].map(|stride| (stride * self.dtype.size()) as u64);
        HeadRows { address: self.address(), strides: self.strides.map(bytes) }
    }

    /// Its memory, from its first element to its last.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks of [`CudaBuffer::strided`] need no device: those of the memory's length come after them.
    fn reason(shape: &[usize], strides: [usize; 2]) -> String {
        CudaBuffer::check_strides(shape, DType::Bf16, strides)
            .map_or_else(|error| error.to_string(), |bytes| bytes.to_string())
    }

    #[test]
    fn packed_projections_and_outer_heads_have_strides() {
        // q of a projection of 8 query heads and two times 2 key heads, and its last key head.
        assert_eq!(reason(&[100, 8, 64], [12 * 64, 64]), ((99 * 12 + 8) * 64 * 2).to_string());
        assert_eq!(reason(&[100, 1, 64], [12 * 64, 8]), ((99 * 12 + 1) * 64 * 2).to_string());
        // [heads, rows, elements]
        assert_eq!(reason(&[100, 8, 64], [64, 100 * 64]), (100 * 8 * 64 * 2).to_string());
        assert_eq!(reason(&[100, 8, 64], [64, 108 * 64]), ((7 * 108 + 100) * 64 * 2).to_string());
    }

    #[test]
    fn what_overlaps_or_is_misaligned_is_refused() {
        assert!(reason(&[100, 8], [64, 8]).contains("2 axes"));
        assert!(reason(&[100, 8, 64], [7 * 64, 64]).contains("overlap"));
        assert!(reason(&[100, 8, 64], [12 * 64, 32]).contains("overlap"));
        assert!(reason(&[100, 8, 64], [64, 99 * 64]).contains("overlap"));
        assert!(reason(&[100, 8, 64], [8 * 64 + 4, 64]).contains("16 bytes"));
        assert_eq!(reason(&[usize::MAX / 64, 8, 64], [1 << 40, 64]), usize::MAX.to_string());
    }
}
