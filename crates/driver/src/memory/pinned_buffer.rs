//! Page-locked host memory, for asynchronous copies and for flags that kernels set for the host.

use std::ptr;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use super::{check_range, take_block};
use crate::pool::{Block, PoolMemory};
use crate::{CudaError, Device};

/// Memory of the host that a device copies from and to while the host does something else. Cheap to clone: a clone is the
/// same memory.
///
/// A copy may be on its way at any time, so no Rust reference into it is ever handed out: values are copied in and out.
#[derive(Clone, Debug)]
pub struct PinnedBuffer(Arc<Pages>);

#[derive(Debug)]
struct Pages {
    device: Device,
    /// `None` of no bytes.
    block: Option<Block>,
    address: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is only reached by raw copies; who orders them is the user of the streams.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl PinnedBuffer {
    /// New pinned memory, all zero.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] when the system does not pin so much.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let pinned = Self::unwritten(device, bytes)?;
        if bytes > 0 {
            // SAFETY: the block has as many bytes, which nothing enqueued uses any more.
            unsafe { ptr::write_bytes(pinned.0.address, 0, bytes) };
        }
        Ok(pinned)
    }

    /// The same, contents arbitrary.
    pub(crate) fn unwritten(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let block = (bytes > 0).then(|| take_block(device, PoolMemory::Host, bytes)).transpose()?;
        let address = block.map_or(ptr::null_mut(), |block| block.address as *mut u8);
        Ok(Self(Arc::new(Pages { device: device.clone(), block, address, bytes })))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// Its first byte's address for kernels, which reach it over PCIe.
    pub fn device_address(&self) -> u64 {
        // With unified addressing, which every GPU here has, the host's own.
        self.0.address as u64
    }

    /// Its first byte's address for the host.
    pub fn address(&self) -> *mut u8 {
        self.0.address
    }

    /// Copies `values` to byte `offset` on.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`].
    pub fn write<T: NoUninit>(&self, offset: usize, values: &[T]) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        check_range(offset, bytes.len(), self.0.bytes)?;
        if !bytes.is_empty() {
            // SAFETY: the range is inside the memory, which no reference points into.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.address.add(offset), bytes.len()) };
        }
        Ok(())
    }

    /// Copies from byte `offset` on into `values`.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`].
    pub fn read<T: AnyBitPattern + NoUninit>(
        &self,
        offset: usize,
        values: &mut [T],
    ) -> Result<(), CudaError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        check_range(offset, bytes.len(), self.0.bytes)?;
        if !bytes.is_empty() {
            // SAFETY: the range is inside the memory, which no reference points into.
            unsafe { ptr::copy_nonoverlapping(self.0.address.add(offset), bytes.as_mut_ptr(), bytes.len()) };
        }
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // A copy may still be on its way.
        if let Some(block) = self.block {
            self.device.pool().give_back(block);
        }
    }
}
