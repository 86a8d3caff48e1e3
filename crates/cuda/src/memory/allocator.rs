//! Memory that comes from somebody else's allocator, PyTorch's caching one say: what is cached there is of use here, and what is not
//! used here any more is of use there.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{CudaError, Device, Stream, StreamPriority};

/// Somebody else's allocator of a device's memory. It is called from any thread, and never while something of this crate is locked that
/// giving memory back needs.
pub trait DeviceAllocator: Send + Sync + fmt::Debug {
    /// The address of `bytes` of device memory, aligned to 256 bytes, which nothing that is enqueued uses: the allocator counts it as
    /// used on `stream` alone, on which nobody else enqueues anything.
    ///
    /// # Errors
    /// [`AllocationError::OutOfMemory`] when there are not so many left.
    fn allocate(&self, bytes: usize, stream: u64) -> Result<u64, AllocationError>;

    /// Takes back what `allocate` gave. Nothing that is enqueued uses it any more.
    fn free(&self, address: u64);

    /// Bytes that it has of the device and has given to nobody.
    fn cached(&self) -> u64;
}

/// Why an allocator gave nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllocationError {
    /// It has not so much.
    OutOfMemory,
    /// In its own words.
    Refused(String),
}

/// An allocator that a machine was given, and the stream that stands for its memory there.
#[derive(Debug)]
pub(crate) struct Lender {
    allocator: Arc<dyn DeviceAllocator>,
    /// Nothing is ever enqueued here: so whatever the allocator keeps for it is idle, and may be used on any stream at once.
    stream: Stream,
}

impl Lender {
    /// # Errors
    /// When the driver has no stream left.
    pub(crate) fn new(device: &Device, allocator: Arc<dyn DeviceAllocator>) -> Result<Self, CudaError> {
        Ok(Self { allocator, stream: empty_stream(device)? })
    }

    /// `None` where it has too little.
    pub(super) fn allocate(&self, bytes: usize) -> Result<Option<u64>, CudaError> {
        match self.allocator.allocate(bytes, self.stream.raw() as u64) {
            Ok(address) if address.is_multiple_of(256) => Ok(Some(address)),
            Ok(address) => {
                self.allocator.free(address);
                Err(CudaError::Misaligned { address })
            }
            Err(AllocationError::OutOfMemory) => Ok(None),
            Err(AllocationError::Refused(reason)) => Err(CudaError::Allocator { reason }),
        }
    }

    pub(super) fn free(&self, address: u64) {
        self.allocator.free(address);
    }

    /// Bytes that it could still give without asking the device.
    pub(crate) fn cached(&self) -> u64 {
        self.allocator.cached()
    }
}

/// A stream of a device on which nothing is enqueued, the same for all. It is never destroyed: allocators remember it with what they
/// have cached (PyTorch's waits for it before it gives expandable segments back to the driver).
fn empty_stream(device: &Device) -> Result<Stream, CudaError> {
    static STREAMS: Mutex<Vec<Stream>> = Mutex::new(Vec::new());
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = streams.iter().find(|stream| stream.device() == device) {
        return Ok(known.clone());
    }
    let stream = Stream::new(&device.for_world(), StreamPriority::Low)?;
    streams.push(stream.clone());
    Ok(stream)
}
