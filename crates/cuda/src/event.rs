use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUipcEventHandle};

use crate::library::call;
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
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Event {
    /// An event to wait for. It takes no time stamps, which makes it cheaper.
    ///
    /// # Errors
    /// When the driver has none left.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Self::with_flags(device, DISABLE_TIMING)
    }

    /// An event that other processes of this host may wait for, once they have opened what [`Event::handle`] gives.
    ///
    /// # Errors
    /// When the driver has none left.
    pub(crate) fn shared(device: &Device) -> Result<Self, CudaError> {
        const INTERPROCESS: u32 = 4;
        Self::with_flags(device, DISABLE_TIMING | INTERPROCESS)
    }

    /// What names a shared event to other processes of this host.
    ///
    /// # Errors
    /// When the system does not share events between processes.
    pub(crate) fn handle(&self) -> Result<Vec<u8>, CudaError> {
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
    pub(crate) fn open(device: &Device, handle: &[u8]) -> Result<Self, CudaError> {
        let driver = device.bind()?;
        let mut raw = ptr::null_mut();
        let handle = CUipcEventHandle { reserved: memory::handle_bytes(handle) };
        // SAFETY: the pointer is to a local; the event is destroyed in drop.
        unsafe { call!(driver, cuIpcOpenEventHandle(&mut raw, handle)) }?;
        Ok(Self::of(device, raw))
    }

    fn of(device: &Device, raw: CUevent) -> Self {
        Self(Arc::new(Mark { device: device.clone(), raw, capture: AtomicU64::new(0) }))
    }

    /// Whether its last mark went into a graph.
    pub(crate) fn is_captured(&self) -> bool {
        self.capture() != 0
    }

    /// The capture that its last mark went into; 0 where it went into none.
    pub(crate) fn capture(&self) -> u64 {
        self.0.capture.load(Ordering::Relaxed)
    }

    /// An event that also takes the time when it is reached, for [`Event::time_since`].
    ///
    /// # Errors
    /// When the driver has none left.
    pub fn timing(device: &Device) -> Result<Self, CudaError> {
        Self::with_flags(device, 0)
    }

    fn with_flags(device: &Device, flags: u32) -> Result<Self, CudaError> {
        let driver = device.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local; the event is destroyed in drop.
        unsafe { call!(driver, cuEventCreate(&mut raw, flags)) }?;
        Ok(Self::of(device, raw))
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
        self.0.capture.store(stream.capture()?, Ordering::Relaxed);
        // SAFETY: both handles are alive.
        unsafe { call!(driver, cuEventRecord(self.0.raw, stream.raw())) }
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

impl fmt::Debug for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Event({:?}, {:p})", self.0.device, self.0.raw)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made in with_flags. Waits that are enqueued keep what they need of it.
        self.device.release(|driver| unsafe { call!(driver, cuEventDestroy_v2(self.raw)) });
    }
}
