//! Step tables: small tables that go to the device together, as one block of bytes that is made without it, by one copy.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUstream;

use super::{DeviceBuffer, PinnedBuffer};
use crate::library::Driver;
use crate::{CudaError, Device};

/// What addresses of tables are multiples of, as those of allocations are.
const ALIGNMENT: usize = 256;

/// Tables that are gathered on the host.
#[derive(Debug, Default)]
pub(crate) struct Tables(Mutex<Option<Gathered>>);

#[derive(Debug)]
struct Gathered {
    place: Arc<OnceLock<DeviceBuffer>>,
    bytes: TableBytes,
}

/// The bytes of tables, each at an offset that is the same wherever the block will lie: no table names an address in it.
#[derive(Debug, Default)]
struct TableBytes(Vec<u8>);

impl TableBytes {
    /// Where a copy of `table` begins.
    fn add(&mut self, table: &[u8]) -> usize {
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), 0);
        let first = self.0.len();
        self.0.extend_from_slice(table);
        first
    }
}

impl Tables {
    /// Memory that has a copy of `table`, and a place on the device, once the tables are sent. The device is not asked.
    pub(crate) fn add(&self, device: &Device, table: &[u8]) -> Result<DeviceBuffer, CudaError> {
        if table.is_empty() {
            return DeviceBuffer::new(device, 0);
        }
        let mut gathered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Gathered { place: Arc::default(), bytes: TableBytes::default() };
        let Gathered { place, bytes } = gathered.get_or_insert_with(new);
        let first = bytes.add(table);
        Ok(DeviceBuffer::of_table(device, place, first, table.len()))
    }

    /// Gives what was added since the last time a place on the device, and enqueues its one copy. Whether there was anything. The stream's
    /// context is current.
    pub(crate) fn send(&self, device: &Device, driver: &Driver, stream: CUstream) -> Result<bool, CudaError> {
        let gathered = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Gathered { place, bytes: TableBytes(bytes) }) = gathered else { return Ok(false) };
        let memory = DeviceBuffer::new(device, bytes.len())?;
        let host = PinnedBuffer::unwritten(device, bytes.len())?;
        host.write(0, &bytes)?;
        // What the host has goes back to the pool now, which lends it again once the stream has come so far.
        memory.enqueue_pinned(driver, stream, &host, 0)?;
        place.get_or_init(|| memory);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_lie_behind_each_other_at_multiples_of_what_kernels_want() {
        let mut bytes = TableBytes::default();
        let tables = [vec![1; 3], vec![2; ALIGNMENT], vec![3; ALIGNMENT + 1], vec![4]];
        let places: Vec<usize> = tables.iter().map(|table| bytes.add(table)).collect();
        assert_eq!(places, [0, ALIGNMENT, 2 * ALIGNMENT, 4 * ALIGNMENT]);
        for (place, table) in places.iter().zip(&tables) {
            assert_eq!(&bytes.0[*place..place + table.len()], table);
        }
        assert_eq!(bytes.0.len(), 4 * ALIGNMENT + 1);
    }
}
