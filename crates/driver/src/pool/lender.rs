//! Memory that comes from somebody else's allocator, PyTorch's caching one say: what is cached there is of use here, and what is not
//! used here any more is of use there.

use std::fmt;
use std::sync::Arc;

use crate::CudaError;

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
#[non_exhaustive]
pub enum AllocationError {
    /// It has not so much.
    OutOfMemory,
    /// In its own words.
    Refused(String),
}

/// An allocator that a machine was given, and the stream that stands for its memory there.
#[derive(Debug)]
pub struct Lender {
    allocator: Arc<dyn DeviceAllocator>,
    /// Nothing is ever enqueued here: so whatever the allocator keeps for it is idle, and may be used on any stream at once.
    stream: u64,
}

impl Lender {
    /// `stream` is one on which nothing is ever enqueued, and that is never destroyed.
    pub fn new(allocator: Arc<dyn DeviceAllocator>, stream: u64) -> Self {
        Self { allocator, stream }
    }

    /// `None` where it has too little.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Option<u64>, CudaError> {
        match self.allocator.allocate(bytes, self.stream) {
            Ok(address) if address.is_multiple_of(256) => Ok(Some(address)),
            Ok(address) => {
                self.allocator.free(address);
                Err(CudaError::Misaligned { address })
            }
            Err(AllocationError::OutOfMemory) => Ok(None),
            Err(AllocationError::Refused(text)) => Err(CudaError::Allocator { text }),
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
