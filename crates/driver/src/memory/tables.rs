//! Step tables: small tables that go to the device together, as one block of bytes that is made without it, by one copy.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytemuck::NoUninit;
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
#[derive(Default)]
struct TableBytes {
    /// Each with its offset. As they came: tables of routings are megabytes, which nobody copies before their way to the device.
    tables: Vec<(usize, Box<dyn Table>)>,
    bytes: usize,
}

/// A table of elements of any kind.
trait Table: Send {
    fn bytes(&self) -> &[u8];
}

impl<T: NoUninit + Send> Table for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl fmt::Debug for TableBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tables of {} bytes", self.tables.len(), self.bytes)
    }
}

impl TableBytes {
    /// Where a table begins, and its bytes.
    fn add(&mut self, table: Box<dyn Table>) -> (usize, usize) {
        let (first, len) = (self.bytes.next_multiple_of(ALIGNMENT), table.bytes().len());
        self.bytes = first + len;
        self.tables.push((first, table));
        (first, len)
    }

    /// Gives each table with its offset.
    fn each<E>(&self, mut write: impl FnMut(usize, &[u8]) -> Result<(), E>) -> Result<(), E> {
        self.tables.iter().try_for_each(|(first, table)| write(*first, table.bytes()))
    }
}

impl Tables {
    /// Memory that has a copy of `table`, and a place on the device, once the tables are sent. The device is not asked.
    pub(crate) fn add<T: NoUninit + Send>(
        &self,
        device: &Device,
        table: Vec<T>,
    ) -> Result<DeviceBuffer, CudaError> {
        if table.is_empty() {
            return DeviceBuffer::new(device, 0);
        }
        let mut gathered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Gathered { place: Arc::default(), bytes: TableBytes::default() };
        let Gathered { place, bytes } = gathered.get_or_insert_with(new);
        let (first, len) = bytes.add(Box::new(table));
        Ok(DeviceBuffer::of_table(device, place, first, len))
    }

    /// Gives what was added since the last time a place on the device, and enqueues its one copy. Whether there was anything. The stream's
    /// context is current.
    pub(crate) fn send(&self, device: &Device, driver: &Driver, stream: CUstream) -> Result<bool, CudaError> {
        let gathered = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Gathered { place, bytes: tables }) = gathered else { return Ok(false) };
        let memory = DeviceBuffer::new(device, tables.bytes)?;
        // What lies between tables is never read.
        let host = PinnedBuffer::unwritten(device, tables.bytes)?;
        tables.each(|first, table| host.write(first, table))?;
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
        let places: Vec<_> =
            tables.iter().map(|table: &Vec<u8>| bytes.add(Box::new(table.clone()))).collect();
        let lengths = [3, ALIGNMENT, ALIGNMENT + 1, 1];
        let wanted = [0, ALIGNMENT, 2 * ALIGNMENT, 4 * ALIGNMENT];
        assert_eq!(places, wanted.into_iter().zip(lengths).collect::<Vec<_>>());
        let mut block = vec![0; bytes.bytes];
        bytes
            .each(|first, table| -> Result<(), ()> {
                block[first..first + table.len()].copy_from_slice(table);
                Ok(())
            })
            .unwrap();
        for (place, table) in wanted.iter().zip(&tables) {
            assert_eq!(&block[*place..place + table.len()], table);
        }
        assert_eq!(block.len(), 4 * ALIGNMENT + 1);
    }
}
