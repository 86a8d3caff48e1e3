//! CUDA streams: priorities, captures, and uploads gathered into one copy.

use std::fmt;
use std::ptr;
use std::sync::{Arc, Weak};

use cudarc::driver::sys::CUstream;

/// The driver's own handle of a stream; the runtime's `cudaStream_t` is the same.
pub type RawStream = CUstream;

use crate::library::call;
use crate::memory::Tables;
use crate::partition::{Part, Partition};
use crate::stream_ends::{capture_of, captures};
use crate::{CudaError, Device};

/// A queue of a device whose operations run in order. Cheap to clone: a clone is the same queue.
#[derive(Clone)]
pub struct Stream {
    queue: Arc<Queue>,
    /// What this handle and its clones gather; see [`Stream::gathering`].
    tables: Option<Arc<Tables>>,
}

struct Queue {
    device: Device,
    raw: CUstream,
    owned: bool,
    /// Whose multiprocessors it runs on, where these are not all.
    _partition: Option<Arc<Partition>>,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

/// A stream that may be gone.
#[derive(Debug, Default)]
pub(crate) struct WeakStream(Weak<Queue>);

impl WeakStream {
    /// As [`Stream::capture`]; 0 where the stream is gone.
    pub(crate) fn capture(&self) -> Result<u64, CudaError> {
        self.0.upgrade().map_or(Ok(0), |queue| queue.capture())
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Stream({:?}, {:p})", self.device, self.raw)
    }
}

impl Queue {
    fn capture(&self) -> Result<u64, CudaError> {
        capture_of(&*self.device.bind()?, self.raw as usize)
    }
}

/// Whose blocks start first when several streams have some ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamPriority {
    /// The least: computation.
    #[default]
    Low,
    /// The greatest that the device has: communication, whose short kernels must not wait behind computation.
    High,
}

/// Streams do not wait for the legacy default stream.
const NON_BLOCKING: u32 = 1;

/// The least and the greatest that the device has.
fn priorities(device: &Device) -> Result<(i32, i32), CudaError> {
    let driver = device.bind()?;
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: the pointers are to locals.
    unsafe { call!(driver, cuCtxGetStreamPriorityRange(&mut least, &mut greatest)) }?;
    Ok((least, greatest))
}

impl Stream {
    /// A new stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// When the driver has none left.
    pub fn new(device: &Device, priority: StreamPriority) -> Result<Self, CudaError> {
        let driver = device.bind()?;
        let (least, greatest) = priorities(device)?;
        let priority = match priority {
            StreamPriority::Low => least,
            StreamPriority::High => greatest,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local; the stream is destroyed in drop.
        unsafe { call!(driver, cuStreamCreateWithPriority(&mut raw, NON_BLOCKING, priority)) }?;
        Ok(Self::of(Queue { device: device.clone(), raw, owned: true, _partition: None }))
    }

    /// A new stream on one of the sets of a device's multiprocessors.
    ///
    /// # Errors
    /// When the driver has none left.
    pub fn on(partition: &Arc<Partition>, device: &Device, part: Part) -> Result<Self, CudaError> {
        let (least, greatest) = priorities(device)?;
        let priority = if part == Part::Communication { greatest } else { least };
        let raw = partition.stream(part, NON_BLOCKING, priority)?;
        let partition = Some(partition.clone());
        Ok(Self::of(Queue { device: device.clone(), raw, owned: true, _partition: partition }))
    }

    /// Someone else's stream, PyTorch's current one say. It is not destroyed when this value goes.
    ///
    /// # Safety
    /// `raw` is a stream of `device`'s primary context and outlives this value and its clones.
    pub unsafe fn borrow(device: &Device, raw: CUstream) -> Self {
        Self::of(Queue { device: device.clone(), raw, owned: false, _partition: None })
    }

    fn of(queue: Queue) -> Self {
        queue.device.stream_ends().join(queue.raw);
        Self { queue: Arc::new(queue), tables: None }
    }

    /// The same queue, by a handle whose [`DeviceBuffer::from_slice`](crate::DeviceBuffer::from_slice) only gathers bytes on the host: they
    /// are nowhere, and have no address, before [`Stream::send_gathered`] or [`Stream::enqueue_gathered`] copies them all at once.
    pub fn gathering(&self) -> Self {
        Self { queue: self.queue.clone(), tables: Some(Arc::default()) }
    }

    /// Where this handle gathers.
    pub(crate) fn tables(&self) -> Option<&Tables> {
        self.tables.as_deref()
    }

    /// Copies what this handle and its clones have gathered, and waits for that.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn send_gathered(&self) -> Result<(), CudaError> {
        if self.enqueue_gathered()? { self.synchronize() } else { Ok(()) }
    }

    /// Enqueues one copy of what this handle and its clones have gathered: what comes later on this stream finds it. Not within a capture,
    /// whose graph would copy what is there no more. Whether there was anything.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn enqueue_gathered(&self) -> Result<bool, CudaError> {
        let Some(tables) = self.tables() else { return Ok(false) };
        tables.send(self.device(), &*self.device().bind()?, self.raw())
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.queue.device
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUstream {
        self.queue.raw
    }

    /// The capture that what is put on it goes into; 0 where it runs.
    pub(crate) fn capture(&self) -> Result<u64, CudaError> {
        self.queue.capture()
    }

    /// The same stream, which this does not keep.
    pub(crate) fn downgrade(&self) -> WeakStream {
        WeakStream(Arc::downgrade(&self.queue))
    }

    /// Whether what is put on it goes into a graph, which somebody captures.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        captures(&*self.queue.device.bind()?, self.queue.raw as usize)
    }

    /// Whether everything enqueued so far has finished.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let driver = self.queue.device.bind()?;
        // SAFETY: the handle is alive.
        driver.check_done("cuStreamQuery", unsafe { (driver.cuStreamQuery)(self.queue.raw) })
    }

    /// Waits until everything enqueued so far has finished.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let driver = self.queue.device.bind()?;
        // SAFETY: the handle is alive.
        unsafe { call!(driver, cuStreamSynchronize(self.queue.raw)) }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.queue.fmt(formatter)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let ends = self.device.stream_ends();
        ends.leave(self.raw);
        self.device.release(|driver| {
            let marked = ends.mark_end(driver, self.raw);
            if !self.owned {
                return marked;
            }
            // SAFETY: made in new. Work that is enqueued still runs; the driver frees the stream after it.
            marked.and(unsafe { call!(driver, cuStreamDestroy_v2(self.raw)) })
        });
    }
}
