//! Device memory: allocated, borrowed from PyTorch, sliced, copied and filled in stream order.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::sys::CUdeviceptr;

use super::pool::Block;
use super::{PinnedBuffer, PoolMemory, check_range, explain_allocation, guard, take_block};
use crate::library::call;
use crate::{CudaError, Device, Stream};

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
        let size = guard::with_guards(bytes);
        explain_allocation(device, "device memory", size, |driver| {
            // SAFETY: the pointer is to a local; the memory is freed in drop.
            unsafe { call!(driver, cuMemAlloc_v2(&mut address, size)) }
        })?;
        let guarded = allocated(guard::inner(address), MemoryKind::Guarded);
        guard::write(&*device.bind()?, guarded.address(), bytes)?;
        Ok(guarded)
    }

    /// New memory with a copy of `values`. Waits until they have been copied, unless the stream gathers what is uploaded.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new`].
    pub fn from_slice<T: NoUninit>(stream: &Stream, values: &[T]) -> Result<Self, CudaError> {
        if let Some(uploads) = stream.uploads() {
            return uploads.add(stream.device(), bytemuck::cast_slice(values));
        }
        let buffer = Self::new(stream.device(), size_of_val(values))?;
        buffer.upload(stream, 0, values)?;
        Ok(buffer)
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

    /// The device whose memory it is.
    pub fn device(&self) -> &Device {
        &self.allocation.device
    }

    /// Whether it is someone else's memory.
    pub(crate) fn is_borrowed(&self) -> bool {
        matches!(self.allocation.kind, MemoryKind::Borrowed)
    }

    /// Whether its allocation stays when it is dropped, until its world ends: then it may be a later buffer's.
    pub(crate) fn stays_allocated(&self) -> bool {
        let MemoryKind::Pooled(block) = self.allocation.kind else { return false };
        self.device().pool().export(block.address);
        true
    }

    /// Its first byte's address on the device.
    pub fn address(&self) -> CUdeviceptr {
        self.allocation.address + self.offset as u64
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

    /// Copies `values` to byte `offset` on, after what is enqueued on `stream`, and waits for it.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`], or when something before it on the stream failed.
    pub fn upload<T: NoUninit>(&self, stream: &Stream, offset: usize, values: &[T]) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        check_range(offset, bytes.len(), self.bytes)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        // SAFETY: both ranges are inside their memory, and the source outlives the copy: we wait for it.
        let copied = unsafe {
            call!(
                driver,
                cuMemcpyHtoDAsync_v2(
                    self.address() + offset as u64,
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    stream.raw()
                )
            )
        };
        let waited = stream.synchronize();
        copied.and(waited)
    }

    /// `count` values from byte `offset` on, as they are after what is enqueued on `stream`. Waits for it.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`], or when something before it on the stream failed.
    pub fn download<T: AnyBitPattern + NoUninit>(
        &self,
        stream: &Stream,
        offset: usize,
        count: usize,
    ) -> Result<Vec<T>, CudaError> {
        check_range(offset, count.saturating_mul(size_of::<T>()), self.bytes)?;
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        if bytes.is_empty() {
            return Ok(values);
        }
        let driver = stream.device().bind()?;
        // SAFETY: both ranges are inside their memory, and the target outlives the copy: we wait for it.
        let copied = unsafe {
            call!(
                driver,
                cuMemcpyDtoHAsync_v2(
                    bytes.as_mut_ptr().cast(),
                    self.address() + offset as u64,
                    bytes.len(),
                    stream.raw()
                )
            )
        };
        let waited = stream.synchronize();
        copied.and(waited)?;
        Ok(values)
    }

    /// Enqueues a copy of all of `source`, of this or a peer device, to byte `offset` on.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`], or when the driver refuses.
    pub fn copy_from(&self, stream: &Stream, offset: usize, source: &Self) -> Result<(), CudaError> {
        check_range(offset, source.bytes, self.bytes)?;
        if source.is_empty() {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        let to = self.address() + offset as u64;
        // SAFETY: both ranges are inside their memory, which nobody else has before what is enqueued has run.
        unsafe { call!(driver, cuMemcpyAsync(to, source.address(), source.bytes, stream.raw())) }
    }

    /// Enqueues that this buffer is filled with the bytes of `source`, again and again from its first byte on.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when `source` is longer or has no bytes for a buffer that has some; when the driver refuses.
    pub fn repeat(&self, stream: &Stream, source: &Self) -> Result<(), CudaError> {
        check_range(0, source.bytes.max(self.bytes.min(1)), source.bytes)?;
        self.copy_from(stream, 0, source)?;
        let mut filled = source.bytes;
        while filled < self.bytes {
            // As much again as is there: a few copies for any length.
            let more = filled.min(self.bytes - filled);
            self.copy_from(stream, filled, &self.slice(0..more)?)?;
            filled += more;
        }
        Ok(())
    }

    /// Enqueues a copy from pinned memory of the host to all of this buffer. What the host writes there before the copy has
    /// run may be copied too.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when the pinned memory has fewer bytes from `pinned_offset` on than this buffer.
    pub fn copy_from_pinned(
        &self,
        stream: &Stream,
        pinned: &PinnedBuffer,
        pinned_offset: usize,
    ) -> Result<(), CudaError> {
        check_range(pinned_offset, self.bytes, pinned.len())?;
        if self.is_empty() {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        // SAFETY: both ranges are inside their memory, which nobody else has before what is enqueued has run.
        unsafe {
            let from = pinned.address().add(pinned_offset).cast();
            call!(driver, cuMemcpyHtoDAsync_v2(self.address(), from, self.bytes, stream.raw()))
        }
    }

    /// Enqueues a copy of all of this buffer to pinned memory of the host. Read it after the stream has come so far.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when the pinned memory has fewer bytes from `pinned_offset` on than this buffer.
    pub fn copy_to_pinned(
        &self,
        stream: &Stream,
        pinned: &PinnedBuffer,
        pinned_offset: usize,
    ) -> Result<(), CudaError> {
        check_range(pinned_offset, self.bytes, pinned.len())?;
        if self.is_empty() {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        // SAFETY: both ranges are inside their memory, which nobody else has before what is enqueued has run.
        unsafe {
            let to = pinned.address().add(pinned_offset).cast();
            call!(driver, cuMemcpyDtoHAsync_v2(to, self.address(), self.bytes, stream.raw()))
        }
    }

    /// Enqueues that every byte becomes `byte`.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn fill(&self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        // SAFETY: the range is inside its memory, which nobody else has before what is enqueued has run.
        unsafe { call!(driver, cuMemsetD8Async(self.address(), byte, self.bytes, stream.raw())) }
    }

    /// Enqueues that every four bytes become `word`. The length is a multiple of 4; what is left of it stays as it is.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn fill_words(&self, stream: &Stream, word: u32) -> Result<(), CudaError> {
        if self.bytes < 4 {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        // SAFETY: the range is inside its memory, which nobody else has before what is enqueued has run.
        unsafe { call!(driver, cuMemsetD32Async(self.address(), word, self.bytes / 4, stream.raw())) }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self.kind {
            MemoryKind::Pooled(block) => self.device.pool().give_back(block),
            MemoryKind::Guarded => {
                self.device.guards().look(&self.device, self.address, self.bytes);
                self.device.release(|driver| {
                    // SAFETY: made by cuMemAlloc in new, which put the guard bytes in front.
                    unsafe { call!(driver, cuMemFree_v2(guard::outer(self.address))) }
                });
            }
            MemoryKind::Borrowed => {}
        }
    }
}
