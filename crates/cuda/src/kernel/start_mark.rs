//! An event that the first kernel of several marks when it has started.

use std::cell::Cell;

use crate::{CudaError, Event, Stream};

/// An event that the first kernel to take it marks once all its blocks hold their multiprocessors; or none.
#[derive(Default)]
pub struct StartMark(Cell<Option<Event>>);

impl StartMark {
    /// This event, where there is one.
    pub fn of(event: Option<Event>) -> Self {
        Self(Cell::new(event))
    }

    /// Nobody waits for the start.
    pub fn none() -> Self {
        Self::default()
    }

    /// For the kernel that is launched next.
    pub(super) fn take(&self) -> Option<Event> {
        self.0.take()
    }

    /// Where no kernel took it, it is marked by what is on `stream` so far.
    ///
    /// # Errors
    /// The driver's.
    pub fn record_rest(&self, stream: &Stream) -> Result<(), CudaError> {
        self.take().map_or(Ok(()), |event| event.record(stream))
    }
}
