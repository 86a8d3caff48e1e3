//! Device memory: allocated, borrowed from PyTorch, and sliced.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::{PinnedBuffer, check_range, explain_allocation, take_block};
use crate::library::{Driver, call};
use crate::pool::{Block, PoolMemory};
use crate::{CudaError, Device, guards};

/// Bytes of a device's memory. Cheap to clone: a clone, like a slice, is the same memory, which lives as long as any of them.
///
/// Contents belong to the streams that work on them; nothing here orders two streams. Only ever read or written through the
/// driver, so that no Rust reference to it exists.
#[derive(Clone, Debug)]
pub struct DeviceBuffer {
    allocation: Arc<Allocation>,
    offset: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Allocation {
    device: Device,
    address: CUdeviceptr,
    bytes: usize,
    kind: MemoryKind,
}

/// Where an allocation comes from, which says how it is released.
#[derive(Debug)]
enum MemoryKind {
    /// Of its world's pool.
    Pooled(Block),
    /// `cuMemAlloc`, with guard bytes around it.
    Guarded,
    /// Someone else's, or none.
    Borrowed,
    /// Of tables, which have a place once they are sent.
    Table(Arc<OnceLock<DeviceBuffer>>),
}

impl DeviceBuffer {
    /// New memory, contents arbitrary, aligned to 256 bytes. `bytes` may be 0: such a buffer has the address 0.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] when it does not fit.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let allocated = |address, kind| {
            let allocation = Allocation { device: device.clone(), address, bytes, kind };
            Self { allocation: Arc::new(allocation), offset: 0, bytes }
        };
        if bytes == 0 {
            return Ok(allocated(0, MemoryKind::Borrowed));
        }
        if !device.guards().are_wanted() {
            let block = take_block(device, PoolMemory::Device, bytes)?;
            return Ok(allocated(block.address, MemoryKind::Pooled(block)));
        }
        let mut address = 0;
        let size = guards::with_guards(bytes);
        explain_allocation(device, "device memory", size, |driver| {
            // SAFETY: the pointer is to a local; the memory is freed in drop.
            unsafe { call!(driver, cuMemAlloc_v2(&mut address, size)) }
        })?;
        let guarded = allocated(guards::inner(address), MemoryKind::Guarded);
        guards::write(&*device.bind()?, guarded.address(), bytes)?;
        Ok(guarded)
    }

    /// Someone else's memory, a tensor of PyTorch say. It is not freed when this value goes.
    ///
    /// # Safety
    /// `bytes` from `address` on are memory that `device` can read and write, and outlive this value, its clones and what
    /// is enqueued with them.
    pub unsafe fn borrow(device: &Device, address: CUdeviceptr, bytes: usize) -> Self {
        let allocation = Allocation { device: device.clone(), address, bytes, kind: MemoryKind::Borrowed };
        Self { allocation: Arc::new(allocation), offset: 0, bytes }
    }

    /// A table of those that will have this place.
    pub(super) fn of_table(
        device: &Device,
        place: &Arc<OnceLock<Self>>,
        offset: usize,
        bytes: usize,
    ) -> Self {
        let kind = MemoryKind::Table(place.clone());
        let allocation = Allocation { device: device.clone(), address: 0, bytes, kind };
        Self { allocation: Arc::new(allocation), offset, bytes }
    }

    /// The device whose memory it is.
    pub fn device(&self) -> &Device {
        &self.allocation.device
    }

    /// Whether it is someone else's memory.
    pub fn is_borrowed(&self) -> bool {
        matches!(self.allocation.kind, MemoryKind::Borrowed)
    }

    /// Whether its allocation stays when it is dropped, until its world ends: then it may be a later buffer's.
    pub fn stays_allocated(&self) -> bool {
        match &self.allocation.kind {
            MemoryKind::Pooled(block) => {
                self.device().pool().export(block.address);
                true
            }
            MemoryKind::Table(place) => place.get().is_some_and(Self::stays_allocated),
            MemoryKind::Guarded | MemoryKind::Borrowed => false,
        }
    }

    /// Its first byte's address on the device.
    ///
    /// # Panics
    /// For what a stream has gathered ([`Stream::gathering`](crate::Stream::gathering)) and has not sent: it lies nowhere yet.
    pub fn address(&self) -> CUdeviceptr {
        let first = match &self.allocation.kind {
            MemoryKind::Table(place) => match place.get() {
                Some(block) => block.address(),
                None => panic!("an address of a table that was gathered and not sent"),
            },
            _ => self.allocation.address,
        };
        first + self.offset as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// A part of it, in bytes. The memory is shared.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`].
    pub fn slice(&self, range: Range<usize>) -> Result<Self, CudaError> {
        let bytes = range.end.saturating_sub(range.start);
        check_range(range.start, bytes, self.bytes)?;
        Ok(Self { allocation: self.allocation.clone(), offset: self.offset + range.start, bytes })
    }

    /// As [`DeviceBuffer::copy_from_pinned`], on a stream of the device whose context is current.
    pub(crate) fn enqueue_pinned(
        &self,
        driver: &Driver,
        stream: CUstream,
        pinned: &PinnedBuffer,
        pinned_offset: usize,
    ) -> Result<(), CudaError> {
        check_range(pinned_offset, self.bytes, pinned.len())?;
        if self.is_empty() {
            return Ok(());
        }
        // SAFETY: both ranges are inside their memory, which nobody else has before what is enqueued has run.
        unsafe {
            let from = pinned.address().add(pinned_offset).cast();
            call!(driver, cuMemcpyHtoDAsync_v2(self.address(), from, self.bytes, stream))
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match &self.kind {
            MemoryKind::Pooled(block) => self.device.pool().give_back(*block),
            MemoryKind::Guarded => {
                let found =
                    self.device.bind().and_then(|driver| guards::look(&driver, self.address, self.bytes));
                self.device.guards().keep(found);
                self.device.release(|driver| {
                    // SAFETY: made by cuMemAlloc in new, which put the guard bytes in front.
                    unsafe { call!(driver, cuMemFree_v2(guards::outer(self.address))) }
                });
            }
            MemoryKind::Borrowed | MemoryKind::Table(_) => {}
        }
    }
}
