//! Kernel barriers: when the communications of a run have started.
//!
//! A Program queues every producer before whoever waits for it, so a wait can name what it needs. That is an event where this crate's own
//! kernel starts, which the driver marks once all its blocks have begun: waiting for an event never occupies anything on the device. It
//! is a counter where a library's kernel starts, which raises it itself.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::counter_waits::{CounterWaits, RaisedCounter};
use crate::sync::lock;
use crate::{CudaError, Device, Event, Stream};

/// Counts the starts of communication operations within a run.
#[derive(Clone)]
pub struct CudaBarrier(Arc<Mutex<Arrivals>>);

/// The arrivals of a run, in the order in which they were enqueued.
struct Arrivals {
    device: Device,
    /// Kept from run to run, so that only the first one makes events; how many this run has used.
    events: Vec<Event>,
    used: usize,
    so_far: Vec<Arrival>,
    /// The stream that waited last, and how many of them it has behind it.
    behind: Option<(usize, usize)>,
    waits: CounterWaits,
}

#[derive(Clone, Copy)]
enum Arrival {
    /// Passed when it has started.
    Event(usize),
    Counter(RaisedCounter),
}

impl CudaBarrier {
    /// Of the streams of this device; `setup` has nothing of a run on it.
    pub fn new(setup: &Stream) -> Self {
        let (device, events, so_far) = (setup.device().clone(), Vec::new(), Vec::new());
        let waits = CounterWaits::new(setup);
        Self(Arc::new(Mutex::new(Arrivals { device, events, used: 0, so_far, behind: None, waits })))
    }

    /// Nobody has arrived.
    pub fn begin_run(&self) {
        let mut arrivals = lock(&self.0);
        arrivals.so_far.clear();
        (arrivals.used, arrivals.behind) = (0, None);
        arrivals.waits.begin_run();
    }

    /// An operation that takes no multiprocessor arrives when it may start: when all before it on `stream` has ended.
    pub(crate) fn arrive(&self, stream: &Stream) -> Result<(), CudaError> {
        self.arrival()?.record(stream)
    }

    /// The event that the operation enqueued next marks when it has started, which is its arrival.
    ///
    /// # Errors
    /// When the driver makes no event.
    pub fn arrival(&self) -> Result<Event, CudaError> {
        let mut arrivals = lock(&self.0);
        let index = arrivals.used;
        if index == arrivals.events.len() {
            let event = Event::new(&arrivals.device)?;
            arrivals.events.push(event);
        }
        arrivals.used += 1;
        arrivals.so_far.push(Arrival::Event(index));
        Ok(arrivals.events[index].clone())
    }

    /// A kernel that has just been enqueued arrives by raising this counter once in every run.
    pub(crate) fn arrive_by(&self, counter: RaisedCounter) {
        lock(&self.0).so_far.push(Arrival::Counter(counter));
    }

    /// `stream` goes on once the first `arrivals` operations have arrived: any so many would do, and these were enqueued. `label` names the
    /// wait in errors; one for a counter lasts `limit` at most.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(
        &self,
        stream: &Stream,
        arrivals: u64,
        label: &str,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let mut state = lock(&self.0);
        let awaited = usize::try_from(arrivals).unwrap_or(usize::MAX).min(state.so_far.len());
        let queue = stream.raw() as usize;
        let begin = state.behind.filter(|(other, _)| *other == queue).map_or(0, |(_, count)| count);
        state.behind = Some((queue, awaited.max(begin)));
        state.so_far[begin.min(awaited)..awaited].iter().try_for_each(|arrival| match arrival {
            Arrival::Event(index) => stream.wait(&state.events[*index]),
            Arrival::Counter(counter) => state.waits.wait(*counter, stream, label, limit),
        })
    }

    /// Its waits for counters.
    pub(super) fn counter_waits(&self) -> CounterWaits {
        lock(&self.0).waits.clone()
    }
}
