//! Small tables that go to the device together: one block there, one copy.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUstream;

use super::{DeviceBuffer, PinnedBuffer};
use crate::library::Driver;
use crate::{CudaError, Device};

/// Bytes of a block, unless a table is longer. What a rank needs of a mask mostly fits one.
const BLOCK_BYTES: usize = 64 << 10;
/// What addresses of tables are multiples of, as those of allocations are.
const ALIGNMENT: usize = 256;

/// Tables that have their place on the device, and are not there yet.
#[derive(Debug, Default)]
pub(crate) struct Uploads(Mutex<Vec<Block>>);

#[derive(Debug)]
struct Block {
    device: DeviceBuffer,
    host: PinnedBuffer,
    used: usize,
}

impl Uploads {
    /// Memory that has a copy of `bytes` once these are sent.
    pub(crate) fn add(&self, device: &Device, bytes: &[u8]) -> Result<DeviceBuffer, CudaError> {
        if bytes.is_empty() {
            return DeviceBuffer::new(device, 0);
        }
        let mut blocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |block: &&mut Block| block.used + bytes.len() <= block.device.len();
        let block = match blocks.last_mut().filter(fits) {
            Some(block) => block,
            None => {
                let length = bytes.len().max(BLOCK_BYTES);
                let (on_device, host) =
                    (DeviceBuffer::new(device, length)?, PinnedBuffer::unwritten(device, length)?);
                blocks.push_mut(Block { device: on_device, host, used: 0 })
            }
        };
        let first = block.used;
        block.host.write(first, bytes)?;
        block.used = (first + bytes.len()).next_multiple_of(ALIGNMENT);
        block.device.slice(first..first + bytes.len())
    }

    /// Enqueues copies of what was added since the last time, one for each block. How many these were. The stream's context is current.
    pub(crate) fn enqueue(&self, driver: &Driver, stream: CUstream) -> Result<usize, CudaError> {
        let blocks = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for Block { device, host, used } in &blocks {
            // What the host has goes back to the pool now, which lends it again once the stream has come so far.
            device.slice(0..(*used).min(device.len()))?.enqueue_pinned(driver, stream, host, 0)?;
        }
        Ok(blocks.len())
    }
}
