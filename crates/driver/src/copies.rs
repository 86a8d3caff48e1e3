//! Copies and fills of device memory, in stream order.

use std::ptr;

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

use crate::library::call;
use crate::memory::check_range;
use crate::{CudaError, DeviceBuffer, PinnedBuffer, Stream};

/// Lines of bytes of device memory, as far apart on either side as its pitch says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PitchedCopy {
    /// The address of the first line.
    pub from: u64,
    /// Where it goes.
    pub to: u64,
    /// Bytes of a line.
    pub bytes: usize,
    /// Lines.
    pub lines: usize,
    /// Bytes from one line to the next where they lie.
    pub from_pitch: usize,
    /// The same where they go.
    pub to_pitch: usize,
}

impl PitchedCopy {
    /// Enqueues it.
    ///
    /// # Safety
    /// All lines lie in memory that the stream's device reaches and that lives until the copy is made; nobody else touches it meanwhile.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = stream.device().bind()?;
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            srcHost: ptr::null(),
            srcDevice: self.from,
            srcArray: ptr::null_mut(),
            srcPitch: self.from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            dstHost: ptr::null_mut(),
            dstDevice: self.to,
            dstArray: ptr::null_mut(),
            dstPitch: self.to_pitch,
            WidthInBytes: self.bytes,
            Height: self.lines,
        };
        // SAFETY: the caller's promise; the driver reads the description before it returns.
        unsafe { call!(driver, cuMemcpy2DAsync_v2(&copy, stream.raw())) }
    }
}

/// Enqueues a copy of `bytes` of device memory from one address to another.
///
/// # Safety
/// As [`PitchedCopy::launch`].
///
/// # Errors
/// When the driver refuses.
pub unsafe fn copy_bytes(stream: &Stream, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
    let driver = stream.device().bind()?;
    // SAFETY: the caller's promise.
    unsafe { call!(driver, cuMemcpyAsync(to, from, bytes, stream.raw())) }
}

impl DeviceBuffer {
    /// New memory with a copy of `values`. Waits until they have been copied, unless the stream gathers what is uploaded.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new`].
    pub fn from_slice<T: NoUninit + Send>(stream: &Stream, values: &[T]) -> Result<Self, CudaError> {
        match stream.tables() {
            Some(_) => Self::from_vec(stream, values.to_vec()),
            None => Self::uploaded(stream, values),
        }
    }

    /// The same of values that nobody needs here any more, which a stream that gathers need not copy.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new`].
    pub fn from_vec<T: NoUninit + Send>(stream: &Stream, values: Vec<T>) -> Result<Self, CudaError> {
        match stream.tables() {
            Some(tables) => tables.add(stream.device(), values),
            None => Self::uploaded(stream, &values),
        }
    }

    fn uploaded<T: NoUninit>(stream: &Stream, values: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::new(stream.device(), size_of_val(values))?;
        buffer.upload(stream, 0, values)?;
        Ok(buffer)
    }

    /// Copies `values` to byte `offset` on, after what is enqueued on `stream`, and waits for it.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`], or when something before it on the stream failed.
    pub fn upload<T: NoUninit>(&self, stream: &Stream, offset: usize, values: &[T]) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        check_range(offset, bytes.len(), self.len())?;
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
        check_range(offset, count.saturating_mul(size_of::<T>()), self.len())?;
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
        check_range(offset, source.len(), self.len())?;
        if source.is_empty() {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        let to = self.address() + offset as u64;
        // SAFETY: both ranges are inside their memory, which nobody else has before what is enqueued has run.
        unsafe { call!(driver, cuMemcpyAsync(to, source.address(), source.len(), stream.raw())) }
    }

    /// Enqueues that this buffer is filled with the bytes of `source`, again and again from its first byte on.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when `source` is longer or has no bytes for a buffer that has some; when the driver refuses.
    pub fn repeat(&self, stream: &Stream, source: &Self) -> Result<(), CudaError> {
        check_range(0, source.len().max(self.len().min(1)), source.len())?;
        self.copy_from(stream, 0, source)?;
        let mut filled = source.len();
        while filled < self.len() {
            // As much again as is there: a few copies for any length.
            let more = filled.min(self.len() - filled);
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
        self.enqueue_pinned(&*stream.device().bind()?, stream.raw(), pinned, pinned_offset)
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
        unsafe { call!(driver, cuMemsetD8Async(self.address(), byte, self.len(), stream.raw())) }
    }

    /// Enqueues that every four bytes become `word`. The length is a multiple of 4; what is left of it stays as it is.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn fill_words(&self, stream: &Stream, word: u32) -> Result<(), CudaError> {
        if self.len() < 4 {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        // SAFETY: the range is inside its memory, which nobody else has before what is enqueued has run.
        unsafe { call!(driver, cuMemsetD32Async(self.address(), word, self.len() / 4, stream.raw())) }
    }
}
