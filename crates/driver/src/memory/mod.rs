//! Memory of devices and pinned memory of the host: what is allocated, lent, shared and watched.

mod device_buffer;
mod guard;
mod pinned_buffer;
mod record_place;
mod shared;
mod tables;

pub use device_buffer::DeviceBuffer;
pub use guard::MemoryGuard;
pub use pinned_buffer::PinnedBuffer;
pub use record_place::RecordPlace;
pub(crate) use shared::handle_bytes;
pub use shared::{AllocationPlace, OpenedMemory};
pub(crate) use tables::Tables;

use std::ptr;

use crate::library::{Driver, call};
use crate::pool::{Block, PoolMemory, block_bytes};
use crate::{CudaError, Device};

/// Checks that `bytes` from `offset` on lie inside of `len`.
pub(crate) fn check_range(offset: usize, bytes: usize, len: usize) -> Result<(), CudaError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        _ => Err(CudaError::OutOfBounds { offset, bytes, len }),
    }
}

/// Memory of `bytes` at least, and not of none: of the pool where that has some, or new.
fn take_block(device: &Device, memory: PoolMemory, bytes: usize) -> Result<Block, CudaError> {
    const PORTABLE: u32 = 1;
    let found = device.pool().take(&*device.bind()?, device.stream_ends(), memory, bytes)?;
    if let Some(block) = found {
        return Ok(block);
    }
    let what = match memory {
        PoolMemory::Device => "device memory",
        PoolMemory::Host => "pinned host memory",
    };
    let asked = bytes;
    let bytes = block_bytes(asked);
    let lender = device.pool().lender().filter(|_| memory == PoolMemory::Device);
    let allocate = |bytes: usize| {
        explain_allocation(device, what, asked, |driver| {
            // SAFETY: the pointers are to locals; the memory is freed by its pool.
            unsafe {
                match memory {
                    PoolMemory::Device => {
                        let mut address = 0;
                        call!(driver, cuMemAlloc_v2(&mut address, bytes)).map(|()| address)
                    }
                    PoolMemory::Host => {
                        let mut address = ptr::null_mut();
                        call!(driver, cuMemHostAlloc(&mut address, bytes, PORTABLE)).map(|()| address as u64)
                    }
                }
            }
        })
    };
    let new = || {
        if let Some(lender) = lender {
            let lent = lender.allocate(bytes)?;
            return lent.map_or_else(|| Err(out_of_memory(device, what, asked)?), Ok);
        }
        match device.pool().cut(memory, bytes, allocate) {
            Ok(Some(address)) => Ok(address),
            // Where there is no room for a slab there may be for the block.
            Ok(None) | Err(CudaError::OutOfMemory { .. }) => allocate(bytes),
            Err(error) => Err(error),
        }
    };
    let address = match new() {
        Err(CudaError::OutOfMemory { .. }) => {
            device.free_unused_memory()?;
            new()
        }
        other => other,
    };
    Ok(Block { memory, address: address?, bytes })
}

/// Turns the driver's "out of memory" into an error with figures.
fn explain_allocation<T>(
    device: &Device,
    what: &'static str,
    bytes: usize,
    allocate: impl FnOnce(&Driver) -> Result<T, CudaError>,
) -> Result<T, CudaError> {
    const OUT_OF_MEMORY: u32 = 2;
    match device.bind().and_then(|driver| allocate(&driver)) {
        Err(CudaError::Driver { code: OUT_OF_MEMORY, .. }) => Err(out_of_memory(device, what, bytes)?),
        other => other,
    }
}

/// With figures; the error is the driver's, when it has none.
fn out_of_memory(device: &Device, what: &'static str, bytes: usize) -> Result<CudaError, CudaError> {
    let memory = device.memory()?;
    Ok(CudaError::OutOfMemory { what, bytes, free: memory.free, total: memory.total })
}
