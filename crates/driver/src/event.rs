//! CUDA events: marks of streams, with times, shared between processes, or inside captures, and what streams wait for.

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUipcEventHandle};

use crate::library::call;
use crate::stream::WeakStream;
use crate::{CudaError, Device, Stream, memory};

const DISABLE_TIMING: u32 = 2;

/// Marks a point of a stream. Cheap to clone: a clone is the same event.
#[derive(Clone)]
pub struct Event(Arc<Mark>);

struct Mark {
    device: Device,
    raw: CUevent,
    /// The capture that its last mark went into, so that there is nothing to wait for outside of it; 0 where it went into none.
    capture: AtomicU64,
    /// The stream that this mark was put on, where it went into a capture.
    captured_on: Mutex<WeakStream>,
    /// Whether it may be another's later.
    is_plain: bool,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

/// An event of the driver's, which is to be destroyed.
fn make(device: &Device, flags: u32) -> Result<CUevent, CudaError> {
    let driver = device.bind()?;
    let mut raw = ptr::null_mut();
    // SAFETY: the pointer is to a local.
    unsafe { call!(driver, cuEventCreate(&mut raw, flags)) }?;
    Ok(raw)
}

impl Event {
    /// An event to wait for. It takes no time stamps, which makes it cheaper.
    ///
    /// # Errors
    /// When the driver has none left.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let raw = device.spare_events().take(|| make(device, DISABLE_TIMING))?;
        Ok(Self::of(device, raw, true))
    }

    /// An event that other processes of this host may wait for, once they have opened what [`Event::handle`] gives.
    ///
    /// # Errors
    /// When the driver has none left.
    pub fn shared(device: &Device) -> Result<Self, CudaError> {
        const INTERPROCESS: u32 = 4;
        Self::with_flags(device, DISABLE_TIMING | INTERPROCESS)
    }

    /// What names a shared event to other processes of this host.
    ///
    /// # Errors
    /// When the system does not share events between processes.
    pub fn handle(&self) -> Result<Vec<u8>, CudaError> {
        let driver = self.0.device.bind()?;
        let mut handle = CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: the pointer is to a local, the event is alive.
        unsafe { call!(driver, cuIpcGetEventHandle(&mut handle, self.0.raw)) }?;
        Ok(handle.reserved.map(|byte| byte as u8).into())
    }

    /// The event of another process that a handle names.
    ///
    /// # Errors
    /// When it names none, or that process is gone.
    pub fn open(device: &Device, handle: &[u8]) -> Result<Self, CudaError> {
        let driver = device.bind()?;
        let mut raw = ptr::null_mut();
        let handle = CUipcEventHandle { reserved: memory::handle_bytes(handle) };
        // SAFETY: the pointer is to a local; the event is destroyed in drop.
        unsafe { call!(driver, cuIpcOpenEventHandle(&mut raw, handle)) }?;
        Ok(Self::of(device, raw, false))
    }

    fn of(device: &Device, raw: CUevent, is_plain: bool) -> Self {
        Self(Arc::new(Mark {
            device: device.clone(),
            raw,
            capture: AtomicU64::new(0),
            captured_on: Mutex::default(),
            is_plain,
        }))
    }

    /// Whether its last mark went into a graph.
    pub fn is_captured(&self) -> bool {
        self.capture() != 0
    }

    /// The capture that its last mark went into; 0 where it went into none.
    pub fn capture(&self) -> u64 {
        self.0.capture.load(Ordering::Relaxed)
    }

    /// Whether the capture that its last mark went into has not ended: the stream with the mark is in it still.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn capture_goes_on(&self) -> Result<bool, CudaError> {
        let captured_on = self.0.captured_on.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(captured_on.capture()? == self.capture())
    }

    /// An event that also takes the time when it is reached, for [`Event::time_since`].
    ///
    /// # Errors
    /// When the driver has none left.
    pub fn timing(device: &Device) -> Result<Self, CudaError> {
        Self::with_flags(device, 0)
    }

    fn with_flags(device: &Device, flags: u32) -> Result<Self, CudaError> {
        Ok(Self::of(device, make(device, flags)?, false))
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUevent {
        self.0.raw
    }

    /// Marks the end of what is enqueued on `stream` so far. An earlier mark is forgotten.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = self.0.device.bind()?;
        let capture = stream.capture()?;
        if capture != 0 {
            *self.0.captured_on.lock().unwrap_or_else(PoisonError::into_inner) = stream.downgrade();
        }
        self.0.capture.store(capture, Ordering::Relaxed);
        // SAFETY: both handles are alive.
        unsafe { call!(driver, cuEventRecord(self.0.raw, stream.raw())) }
    }

    /// Whether the next launch on `stream` may put the mark, which then is one of the stream. Not within a capture, where only kernels could
    /// follow it, and where nothing but [`Event::record`] notes that the mark went into a graph: who asked whether it was reached, or was
    /// lent the event later, would have the driver's `CUDA_ERROR_INVALID_VALUE`.
    pub(crate) fn is_left_to_launch(&self, stream: &Stream) -> Result<bool, CudaError> {
        let is_left = stream.capture()? == 0;
        if is_left {
            self.0.capture.store(0, Ordering::Relaxed);
        }
        Ok(is_left)
    }

    /// Whether the mark has been reached. True when it was never recorded, or went into a graph.
    ///
    /// # Errors
    /// When something before the mark failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        if self.is_captured() {
            return Ok(true);
        }
        let driver = self.0.device.bind()?;
        // SAFETY: the handle is alive.
        driver.check_done("cuEventQuery", unsafe { (driver.cuEventQuery)(self.0.raw) })
    }

    /// Waits until the mark has been reached.
    ///
    /// # Errors
    /// When something before the mark failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let driver = self.0.device.bind()?;
        // SAFETY: the handle is alive.
        unsafe { call!(driver, cuEventSynchronize(self.0.raw)) }
    }

    /// The device's time between two marks that have been reached. Both events take time stamps. The resolution is about
    /// half a microsecond.
    ///
    /// # Errors
    /// When either mark has not been reached, or takes no time stamps.
    pub fn time_since(&self, start: &Self) -> Result<Duration, CudaError> {
        let driver = self.0.device.bind()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: the handles are alive, the pointer is to a local of the right type.
        unsafe { call!(driver, cuEventElapsedTime(&mut milliseconds, start.0.raw, self.0.raw)) }?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) * 1e-3))
    }
}

impl Stream {
    /// Lets what is enqueued from now on wait for the point that `event` marks now, by which a stream joins a capture that `event` was
    /// recorded in and that goes on. An event that was never recorded is no wait at all. Nor is one of another capture than the stream is
    /// in, of one that has ended, or of none: whoever launches a graph orders it with what is not in it.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        match self.capture()? {
            0 if event.is_captured() && !event.capture_goes_on()? => Ok(()),
            0 => self.wait_for_mark(event),
            _ => self.follow(event),
        }
    }

    /// As [`Stream::wait`], but joins no capture: an event of a capture that the stream is not in is no wait at all.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn follow(&self, event: &Event) -> Result<(), CudaError> {
        if event.capture() == self.capture()? { self.wait_for_mark(event) } else { Ok(()) }
    }

    fn wait_for_mark(&self, event: &Event) -> Result<(), CudaError> {
        let driver = self.device().bind()?;
        // SAFETY: both handles are alive.
        unsafe { call!(driver, cuStreamWaitEvent(self.raw(), event.raw(), 0)) }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Event({:?}, {:p})", self.0.device, self.0.raw)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // What went into a graph is no mark of a stream.
        if self.is_plain && *self.capture.get_mut() == 0 {
            return self.device.spare_events().put(self.raw);
        }
        // SAFETY: made in make. Waits that are enqueued keep what they need of it.
        self.device.release(|driver| unsafe { call!(driver, cuEventDestroy_v2(self.raw)) });
    }
}
