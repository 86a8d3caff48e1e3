//! Copies and fills of device memory, in stream order.

use bytemuck::{AnyBitPattern, NoUninit};

use crate::library::call;
use crate::memory::check_range;
use crate::{CudaError, DeviceBuffer, PinnedBuffer, Stream};

impl DeviceBuffer {
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
        check_range(pinned_offset, self.len(), pinned.len())?;
        if self.is_empty() {
            return Ok(());
        }
        let driver = stream.device().bind()?;
        // SAFETY: both ranges are inside their memory, which nobody else has before what is enqueued has run.
        unsafe {
            let to = pinned.address().add(pinned_offset).cast();
            call!(driver, cuMemcpyDtoHAsync_v2(to, self.address(), self.len(), stream.raw()))
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
