//! Guard bytes around allocations, and what they found: a device's own record of kernels that write out of bounds.

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUdeviceptr;

use crate::CudaError;
use crate::library::{Driver, call};

/// Guard bytes in front of a buffer: as many as keep its alignment.
const FRONT: usize = 256;
/// Guard bytes behind it: a row of a tile and more, so that a store to the row after the last is seen.
const BEHIND: usize = 4096;
/// What guard bytes hold. As bf16, f16 and f32 a number that no result is, nor zero nor NaN, which kernels do store.
const PATTERN: u8 = 0x5a;

/// What guard bytes found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuardReport {
    /// Buffers whose guard bytes were looked at: those that were allocated and freed meanwhile.
    pub buffers: usize,
    /// Those whose guard bytes were written over.
    pub overwritten: Vec<Overwrite>,
    /// What kept guard bytes from being written or read, such as the error of a kernel before.
    pub error: Option<CudaError>,
}

/// A buffer next to which something was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overwrite {
    /// The buffer's bytes.
    pub bytes: usize,
    /// The first guard byte that was written over, counted from the buffer's start: negative in front of it.
    pub offset: i64,
    /// How many of its guard bytes were.
    pub count: usize,
}

impl std::fmt::Display for Overwrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} bytes next to a buffer of {} were written over, the first at byte {}",
            self.count, self.bytes, self.offset
        )
    }
}

/// A device's own record; `None` while nobody watches.
#[derive(Default)]
pub(crate) struct Guards(Mutex<Option<GuardReport>>);

impl Guards {
    /// Somebody begins to watch.
    pub(crate) fn begin(&self) {
        *self.lock() = Some(GuardReport::default());
    }

    /// What was seen since the beginning or since this was last asked.
    pub(crate) fn report(&self) -> GuardReport {
        self.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Nobody watches any more.
    pub(crate) fn end(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<GuardReport>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody watches.
    pub(crate) fn are_wanted(&self) -> bool {
        self.lock().is_some()
    }

    /// Keeps what was found of a buffer that is about to be freed.
    pub(crate) fn keep(&self, found: Result<Option<Overwrite>, CudaError>) {
        if let Some(report) = &mut *self.lock() {
            report.buffers += 1;
            match found {
                Ok(found) => report.overwritten.extend(found),
                Err(error) => report.error = report.error.take().or(Some(error)),
            }
        }
    }
}

/// Bytes of an allocation whose buffer has `bytes`.
pub(crate) fn with_guards(bytes: usize) -> usize {
    bytes.saturating_add(FRONT + BEHIND)
}

/// The buffer's address in an allocation.
pub(crate) fn inner(base: CUdeviceptr) -> CUdeviceptr {
    base + FRONT as u64
}

/// The allocation of a buffer.
pub(crate) fn outer(address: CUdeviceptr) -> CUdeviceptr {
    address - FRONT as u64
}

/// Writes the guard bytes of a new buffer, and waits for it.
pub(crate) fn write(driver: &Driver, address: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
    let null = ptr::null_mut();
    // SAFETY: both ranges lie in the allocation, whose size `with_guards` gave.
    unsafe {
        call!(driver, cuMemsetD8Async(outer(address), PATTERN, FRONT, null))?;
        call!(driver, cuMemsetD8Async(address + bytes as u64, PATTERN, BEHIND, null))?;
        call!(driver, cuStreamSynchronize(null))
    }
}

/// Looks at the guard bytes of a buffer, once everything that was enqueued on the device has finished. Its context is current.
pub(crate) fn look(
    driver: &Driver,
    address: CUdeviceptr,
    bytes: usize,
) -> Result<Option<Overwrite>, CudaError> {
    // SAFETY: the context is current.
    unsafe { call!(driver, cuCtxSynchronize()) }?;
    let mut guard = [0u8; FRONT + BEHIND];
    let (front, behind) = guard.split_at_mut(FRONT);
    let null = ptr::null_mut();
    // SAFETY: the ranges lie in the allocation, the slices are as long, and we wait for the copies.
    unsafe {
        call!(driver, cuMemcpyDtoHAsync_v2(front.as_mut_ptr().cast(), outer(address), FRONT, null))?;
        let end = address + bytes as u64;
        call!(driver, cuMemcpyDtoHAsync_v2(behind.as_mut_ptr().cast(), end, BEHIND, null))?;
        call!(driver, cuStreamSynchronize(null))?;
    }
    Ok(compare(&guard, bytes))
}

fn compare(guard: &[u8], bytes: usize) -> Option<Overwrite> {
    let changed = |&at: &usize| guard[at] != PATTERN;
    let first = (0..guard.len()).find(changed)?;
    let offset = if first < FRONT { first as i64 - FRONT as i64 } else { (bytes + first - FRONT) as i64 };
    Some(Overwrite { bytes, offset, count: (0..guard.len()).filter(changed).count() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_changed_is_counted_from_the_buffer() {
        let mut guard = [PATTERN; FRONT + BEHIND];
        assert_eq!(compare(&guard, 100), None);
        guard[FRONT + 7] = 0;
        assert_eq!(compare(&guard, 100), Some(Overwrite { bytes: 100, offset: 107, count: 1 }));
        guard[FRONT - 1] = 0;
        let found = compare(&guard, 100).unwrap();
        assert_eq!((found.offset, found.count), (-1, 2));
        assert!(found.to_string().contains("2 bytes next to a buffer of 100"), "{found}");
    }
}
