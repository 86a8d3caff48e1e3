//! The place of a record that kernels leave for the host.

use std::ptr;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use super::explain_allocation;
use crate::host_records::RECORD_BYTES;
use crate::library::call;
use crate::{CudaError, Device};

/// The place of one record. It comes back when the last clone goes.
#[derive(Clone, Debug)]
pub struct RecordPlace(Arc<Held>);

#[derive(Debug)]
struct Held {
    device: Device,
    address: usize,
    stop: usize,
}

impl RecordPlace {
    /// A place for a record of this device's world, all zero.
    ///
    /// # Errors
    /// When the host's memory cannot be pinned.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        const PORTABLE: u32 = 1;
        let [address, stop] = device.host_records().take(|bytes| {
            let mut page = ptr::null_mut();
            explain_allocation(device, "pinned host memory", bytes, |driver| {
                // SAFETY: the pointer is to a local; the memory is freed with the records.
                unsafe { call!(driver, cuMemHostAlloc(&mut page, bytes, PORTABLE)) }
            })?;
            Ok(page as usize)
        })?;
        Ok(Self(Arc::new(Held { device: device.clone(), address, stop })))
    }

    /// Its address for kernels, and that of the word that ends waits: with unified addressing, which every GPU here has, the host's own.
    pub fn addresses(&self) -> (u64, u64) {
        (self.0.address as u64, self.0.stop as u64)
    }

    /// Whether there are other clones.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// What is there.
    pub fn read<T: AnyBitPattern + NoUninit>(&self) -> T {
        const { assert!(size_of::<T>() == RECORD_BYTES) };
        // SAFETY: the place has as many bytes, any of which are a T; a kernel may be writing them, word by word.
        unsafe { ptr::read_volatile(self.0.address as *const T) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.device.host_records().put(self.address);
    }
}
