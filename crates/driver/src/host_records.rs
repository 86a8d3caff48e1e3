//! Records in the host's memory that kernels of one world leave for it, and the word by which all their waits end.
//!
//! They lie in few pages, so that one word says whether any was left, and none is pinned or freed while kernels run.

use std::ptr;
use std::sync::{Mutex, PoisonError};

use crate::CudaError;
use crate::library::{Driver, call};

/// Bytes of a record.
pub(crate) const RECORD_BYTES: usize = 64;
/// Records of a page. That of the first page which has the number 0 holds the word that ends all waits.
const RECORDS: usize = 1024;

/// The pages of one world on one device, made when they are first needed.
#[derive(Debug, Default)]
pub(crate) struct HostRecords(Mutex<Pages>);

#[derive(Debug, Default)]
struct Pages {
    /// Of pinned memory, aligned to a page of the host.
    addresses: Vec<usize>,
    /// Records of which nobody holds the place.
    free: Vec<usize>,
    /// Whether waits were ended before there was a word for it.
    stopped: bool,
}

impl HostRecords {
    /// The address of a record, all zero, and of the word that ends waits; `pin` gives so many bytes of pinned memory where all are taken.
    ///
    /// # Errors
    /// Those of `pin`.
    pub(crate) fn take(
        &self,
        pin: impl FnOnce(usize) -> Result<usize, CudaError>,
    ) -> Result<[usize; 2], CudaError> {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pages.free.is_empty() {
            let bytes = RECORDS * RECORD_BYTES;
            let page = pin(bytes)?;
            // SAFETY: just allocated, with this many bytes.
            unsafe { pages.add(page) };
        }
        let stop = pages.addresses[0];
        let address = pages.free.pop().unwrap_or(stop);
        // SAFETY: a record of a page that is not freed before its world ends; nobody else has its place.
        unsafe { ptr::write_bytes(address as *mut u8, 0, RECORD_BYTES) };
        Ok([address, stop])
    }

    /// Takes the address of a record back.
    pub(crate) fn put(&self, address: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).free.push(address);
    }

    /// Ends all waits, those that have not begun too.
    pub(crate) fn stop(&self) {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pages.stopped = true;
        if let Some(word) = pages.addresses.first() {
            // SAFETY: a word of a page that lives as long as this value.
            unsafe { ptr::write_volatile(*word as *mut u64, 1) };
        }
    }

    /// Whether waits were ended: by [`HostRecords::stop`], or by one that gave up and left a record. One read of one word.
    pub(crate) fn is_stopped(&self) -> bool {
        let pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `stop`.
        pages.stopped
            || pages
                .addresses
                .first()
                .is_some_and(|word| unsafe { ptr::read_volatile(*word as *const u64) } != 0)
    }

    /// Frees the pages at the end of a world, whose last kernels may still leave records: their waits end, and they are waited for.
    /// The device's context is current.
    pub(crate) fn free(&self, driver: &Driver) -> Result<(), CudaError> {
        self.stop();
        let pages = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        if pages.addresses.is_empty() {
            return Ok(());
        }
        // SAFETY: the context is current.
        unsafe { call!(driver, cuCtxSynchronize()) }?;
        pages.addresses.iter().try_for_each(|address| {
            // SAFETY: memory of cuMemHostAlloc in `add`.
            unsafe { call!(driver, cuMemFreeHost(*address as *mut _)) }
        })
    }
}

impl Pages {
    /// Adds a page.
    ///
    /// # Safety
    /// It is pinned memory of [`RECORDS`] records, which nobody else has.
    unsafe fn add(&mut self, page: usize) {
        // SAFETY: as the caller says.
        unsafe { ptr::write_bytes(page as *mut u8, 0, RECORDS * RECORD_BYTES) };
        let first = usize::from(self.addresses.is_empty());
        self.addresses.push(page);
        self.free.extend((first..RECORDS).rev().map(|record| page + record * RECORD_BYTES));
        if self.stopped {
            // SAFETY: the first word of the first page.
            unsafe { ptr::write_volatile(self.addresses[0] as *mut u64, 1) };
        }
    }
}
