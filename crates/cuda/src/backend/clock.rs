//! The time base of measured timelines: CUDA events of all ranks of a device against one mark.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;
use crate::{CudaError, Event, Stream};

/// One time base for all ranks of a device: the first of them to begin a run marks the device's time, the others, which have
/// the same origin, measure from the same mark. So spans of different ranks can be compared exactly.
#[derive(Default)]
pub(crate) struct Clock(Mutex<Option<RunClock>>);

/// The device's time of one run.
#[derive(Clone)]
pub(crate) struct RunClock {
    origin: Instant,
    mark: Event,
    /// Between the origin and the mark, by the host's clock.
    offset: Duration,
}

impl Clock {
    /// The time base of the run that is measured from `origin`. `idle` is a stream with nothing on it.
    pub(crate) fn of_run(&self, origin: Instant, idle: &Stream) -> Result<RunClock, CudaError> {
        let mut clock = lock(&self.0);
        if let Some(known) = clock.as_ref().filter(|known| known.origin == origin) {
            return Ok(known.clone());
        }
        let mark = Event::timing(idle.device())?;
        mark.record(idle)?;
        let run = RunClock { origin, mark, offset: origin.elapsed() };
        *clock = Some(run.clone());
        Ok(run)
    }
}

impl RunClock {
    /// When `event` was passed, in seconds since the origin.
    pub(crate) fn seconds(&self, event: &Event) -> Result<f64, CudaError> {
        Ok((self.offset + event.time_since(&self.mark)?).as_secs_f64())
    }
}
