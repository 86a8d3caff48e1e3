//! The upload of a collective's lists of rows, and the events by which calls on any stream come behind it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::{CallFault, CudaError, Device, Event, Stream};

/// An upload of some kilobytes takes microseconds.
const MOST: Duration = Duration::from_secs(5);

/// When the lists of a collective are on the device. Calls on several streams read them, so that they are uploaded on none of these, where
/// they might be behind anything.
pub(super) struct Lists {
    device: Device,
    uploaded: Event,
    /// Whether that is known to be over.
    are_there: AtomicBool,
}

impl Lists {
    /// Of nothing yet.
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        let (device, uploaded) = (device.clone(), Event::new(device)?);
        Ok(Self { device, uploaded, are_there: AtomicBool::new(true) })
    }

    /// Has `make` gather lists, and enqueues their upload on `setup`, which has nothing of a call on it.
    pub(super) fn upload<T, E: From<CudaError>>(
        &self,
        setup: &Stream,
        make: impl FnOnce(&Stream) -> Result<T, E>,
    ) -> Result<T, E> {
        let gathering = setup.gathering();
        let made = make(&gathering)?;
        gathering.enqueue_gathered()?;
        self.uploaded.record(setup)?;
        self.are_there.store(false, Ordering::Relaxed);
        Ok(made)
    }

    /// What is enqueued on `queue` from now on may read them.
    pub(super) fn follow(&self, queue: &Stream) -> Result<(), CudaError> {
        if self.are_there.load(Ordering::Relaxed) {
            return Ok(());
        }
        // A graph runs later, and cannot wait for what is not in it.
        let is_over =
            if queue.is_capturing()? { self.ends_despite_capture()? } else { self.uploaded.is_done()? };
        if is_over {
            self.are_there.store(true, Ordering::Relaxed);
            return Ok(());
        }
        queue.wait(&self.uploaded)
    }

    /// Polls until the upload has ended.
    fn ends_despite_capture(&self) -> Result<bool, CudaError> {
        let began = Instant::now();
        while !self.device.despite_captures(|| self.uploaded.is_done())? {
            if began.elapsed() > MOST {
                let reason = CallFault::ListsNotThere { limit: MOST }.into();
                return Err(CudaError::Launch { kernel: "a captured collective".to_owned(), reason });
            }
            std::hint::spin_loop();
        }
        Ok(true)
    }
}
