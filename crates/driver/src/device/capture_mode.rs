//! What a thread may do while streams capture.

use cudarc::driver::sys::CUstreamCaptureMode;

use super::Device;
use crate::CudaError;
use crate::library::{Driver, call};

/// A thread's mode for as long as this lives, however that ends: a thread that a panic left in another mode would do later what a capture
/// of its own forbids, and end up with a graph that lacks it.
struct ModeOfThread<'a> {
    driver: &'a Driver,
    before: CUstreamCaptureMode,
}

impl<'a> ModeOfThread<'a> {
    fn relaxed(driver: &'a Driver) -> Result<Self, CudaError> {
        let mut before = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a local, which takes the mode that this thread has had.
        unsafe { call!(driver, cuThreadExchangeStreamCaptureMode(&mut before)) }?;
        Ok(Self { driver, before })
    }
}

impl Drop for ModeOfThread<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer is to a field of this thread's own. The driver has taken a mode there before; what it says now is of no use.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&mut self.before) };
    }
}

impl Device {
    /// Does `work`, which is in no graph, also while a stream captures: what allocates, or asks whether something has ended, would else be
    /// refused, and end another thread's capture.
    ///
    /// # Errors
    /// When the driver refuses; those of `work`.
    pub fn despite_captures<T, E: From<CudaError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let driver = self.bind()?;
        let _mode = ModeOfThread::relaxed(&driver)?;
        work()
    }
}
