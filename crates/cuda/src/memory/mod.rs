//! Memory of devices, pinned memory of the host, and copies between them.

mod device_buffer;
mod guard;
mod pinned_buffer;
mod shared;

pub use device_buffer::DeviceBuffer;
pub(crate) use guard::Guards;
pub use guard::{GuardReport, MemoryGuard, Overwrite};
pub use pinned_buffer::PinnedBuffer;
pub(crate) use shared::{AllocationPlace, OpenedMemory, handle_bytes};

use crate::library::Driver;
use crate::{CudaError, Device};

/// Checks that `bytes` from `offset` on lie inside of `len`.
fn check_range(offset: usize, bytes: usize, len: usize) -> Result<(), CudaError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        _ => Err(CudaError::OutOfBounds { offset, bytes, len }),
    }
}

/// Turns the driver's "out of memory" into an error with figures.
fn explain_allocation(
    device: &Device,
    what: &'static str,
    bytes: usize,
    allocate: impl FnOnce(&Driver) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    const OUT_OF_MEMORY: u32 = 2;
    match device.bind().and_then(|driver| allocate(&driver)) {
        Err(CudaError::Driver { code: OUT_OF_MEMORY, .. }) => {
            let memory = device.memory()?;
            Err(CudaError::OutOfMemory { what, bytes, free: memory.free, total: memory.total })
        }
        other => other,
    }
}
