//! The lender of a machine's memory: somebody else's allocator, with a stream that stands for all that it lends.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{CudaError, Device, Stream, StreamPriority};
use counterpoint_driver::{DeviceAllocator, Lender};

/// Somebody else's allocator of this device's memory, as worlds borrow from it.
///
/// # Errors
/// When the driver has no stream left.
pub(super) fn lender(device: &Device, allocator: Arc<dyn DeviceAllocator>) -> Result<Arc<Lender>, CudaError> {
    Ok(Arc::new(Lender::new(allocator, empty_stream(device)?.raw() as u64)))
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
