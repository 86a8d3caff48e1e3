//! Signals: what streams raise are events, what kernels raise while they run are counters on the device (`counter_waits`).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::counter_waits::{CounterWaits, RaisedCounter};
use crate::kernel::LinkArrivals;
use crate::sync::lock;
use crate::{CudaError, Event, Stream};

/// A counter that streams and kernels raise and streams wait for, within a run.
#[derive(Clone)]
pub struct CudaSignal(Arc<Mutex<State>>);

struct State {
    /// What this run raises it to, in the order in which it was enqueued.
    raises: Vec<(u64, Raise)>,
    /// Kept from run to run, so that only the first one makes events; how many this run has used.
    events: Vec<Event>,
    used: usize,
    waits: CounterWaits,
    /// Where kernels with device-side barriers raise it: what a kernel may wait for by itself, because those have started before.
    arrivals: Option<LinkArrivals>,
}

#[derive(Clone, Copy)]
enum Raise {
    /// Passed when it is raised.
    Event(usize),
    Counter(RaisedCounter),
}

impl CudaSignal {
    /// `setup` has nothing of a run on it.
    pub(super) fn new(setup: &Stream) -> Self {
        let (raises, events, waits) = (Vec::new(), Vec::new(), CounterWaits::new(setup));
        Self(Arc::new(Mutex::new(State { raises, events, used: 0, waits, arrivals: None })))
    }

    pub(super) fn begin_run(&self) {
        let mut state = lock(&self.0);
        state.raises.clear();
        state.used = 0;
        state.arrivals = None;
        state.waits.begin_run();
    }

    /// What is enqueued on `stream` so far raises it.
    pub(crate) fn raise(&self, stream: &Stream, value: u64) -> Result<(), CudaError> {
        let mut state = lock(&self.0);
        let index = state.used;
        if index == state.events.len() {
            let event = Event::new(stream.device())?;
            state.events.push(event);
        }
        state.events[index].record(stream)?;
        state.used += 1;
        state.raises.push((value, Raise::Event(index)));
        Ok(())
    }

    /// What raises it is enqueued next, and a kernel may wait for that.
    pub(crate) fn deliver(&self, arrivals: LinkArrivals) {
        lock(&self.0).arrivals = Some(arrivals);
    }

    /// What a kernel that is enqueued next on `stream` waits for by itself; where it cannot, the stream waits for all.
    pub(super) fn arrivals(&self, stream: &Stream) -> Result<LinkArrivals, CudaError> {
        let arrivals = lock(&self.0).arrivals;
        match arrivals {
            Some(arrivals) => Ok(arrivals),
            None => self.wait_for_all(stream).map(|()| LinkArrivals::NONE),
        }
    }

    /// `stream` goes on once all raises by streams that were enqueued have happened.
    pub(super) fn wait_for_all(&self, stream: &Stream) -> Result<(), CudaError> {
        let state = lock(&self.0);
        state.events[..state.used].iter().try_for_each(|event| stream.wait(event))
    }

    /// A kernel that has just been enqueued raises it to 1, 2 and so on, and says so by these counters.
    pub(super) fn raised_by_kernel(&self, counters: impl IntoIterator<Item = RaisedCounter>) {
        let counters = counters.into_iter().map(Raise::Counter);
        lock(&self.0).raises.extend((1..).zip(counters));
    }

    /// `stream` goes on after the first raise to at least `value` that was enqueued: whichever comes first would do. `label` names the
    /// wait in errors; it lasts `limit` at most.
    pub(super) fn wait(
        &self,
        stream: &Stream,
        value: u64,
        label: &str,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let state = lock(&self.0);
        let enough = state.raises.iter().find(|(raised, _)| *raised >= value).map(|(_, raise)| *raise);
        match enough {
            None => Ok(()),
            Some(Raise::Event(index)) => stream.wait(&state.events[index]),
            Some(Raise::Counter(counter)) => state.waits.wait(counter, stream, label, limit),
        }
    }

    /// Its waits for counters.
    pub(super) fn counter_waits(&self) -> CounterWaits {
        lock(&self.0).waits.clone()
    }
}
