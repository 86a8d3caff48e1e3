//! Records in the host's memory that kernels of one world leave for it, and the word by which all their waits end.
//!
//! They lie in few pages, so that one word tells whether any was left, and none is pinned or freed while kernels run.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{AnyBitPattern, NoUninit};

use super::explain_allocation;
use crate::library::{Driver, call};
use crate::{CudaError, Device};

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

/// The place of one record. It comes back when the last clone goes.
#[derive(Clone, Debug)]
pub(crate) struct RecordPlace(Arc<Held>);

#[derive(Debug)]
struct Held {
    device: Device,
    address: usize,
    stop: usize,
}

impl HostRecords {
    /// A place for a record, all zero. `device` is the one whose records these are.
    ///
    /// # Errors
    /// When the host's memory cannot be pinned.
    pub(crate) fn place(&self, device: &Device) -> Result<RecordPlace, CudaError> {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pages.free.is_empty() {
            pages.add(device)?;
        }
        let stop = pages.addresses[0];
        let address = pages.free.pop().unwrap_or(stop);
        // SAFETY: a record of a page that is never freed while `device` lives; nobody else has its place.
        unsafe { ptr::write_bytes(address as *mut u8, 0, RECORD_BYTES) };
        Ok(RecordPlace(Arc::new(Held { device: device.clone(), address, stop })))
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
    fn add(&mut self, device: &Device) -> Result<(), CudaError> {
        const PORTABLE: u32 = 1;
        let (bytes, mut address) = (RECORDS * RECORD_BYTES, ptr::null_mut());
        explain_allocation(device, "pinned host memory", bytes, |driver| {
            // SAFETY: the pointer is to a local; the memory is freed in `free`.
            unsafe { call!(driver, cuMemHostAlloc(&mut address, bytes, PORTABLE)) }
        })?;
        // SAFETY: just allocated, with this many bytes.
        unsafe { ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        let page = address as usize;
        let first = usize::from(self.addresses.is_empty());
        self.addresses.push(page);
        self.free.extend((first..RECORDS).rev().map(|record| page + record * RECORD_BYTES));
        if self.stopped {
            // SAFETY: the first word of the first page.
            unsafe { ptr::write_volatile(self.addresses[0] as *mut u64, 1) };
        }
        Ok(())
    }
}

impl RecordPlace {
    /// Its address for kernels, and that of the word that ends waits: with unified addressing, which every GPU here has, the host's own.
    pub(crate) fn addresses(&self) -> (u64, u64) {
        (self.0.address as u64, self.0.stop as u64)
    }

    /// Whether there are other clones.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// What is there.
    pub(crate) fn read<T: AnyBitPattern + NoUninit>(&self) -> T {
        const { assert!(size_of::<T>() == RECORD_BYTES) };
        // SAFETY: the place has as many bytes, any of which are a T; a kernel may be writing them, word by word.
        unsafe { ptr::read_volatile(self.0.address as *const T) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let records = self.device.host_records();
        records.0.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.address);
    }
}
