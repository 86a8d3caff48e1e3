//! Signals: what streams raise are events, what kernels raise while they run are counters on the device.
//!
//! A counter's wait is a kernel of one thread, enqueued after the kernel that raises it. That kernel depends on nothing that is
//! enqueued after it and runs on the same GPU, so the wait ends on any number of hardware queues: it may hold up what shares one
//! with it, but never what it waits for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::kernel::{LinkArrivals, MissedWait, SignalWait, SignalWaits, WaitRecord};
use crate::sync::lock;
use crate::{CudaError, Event, Stream};

/// A counter that streams and kernels raise and streams wait for, within a run.
#[derive(Clone)]
pub struct CudaSignal(Arc<Mutex<State>>);

struct State {
    setup: Stream,
    /// What this run raises it to, in the order in which it was enqueued.
    raises: Vec<(u64, Raise)>,
    /// Kept from run to run, so that only the first one makes events; how many this run has used.
    events: Vec<Event>,
    used: usize,
    /// Likewise waits for counters, with their operations' labels.
    waits: Option<Waits>,
    /// Where kernels with device-side barriers raise it: what a kernel may wait for by itself, because those have started before.
    arrivals: Option<LinkArrivals>,
}

#[derive(Clone, Copy)]
enum Raise {
    /// Passed when it is raised.
    Event(usize),
    Counter(RaisedCounter),
}

/// A counter on the device that says that a signal is raised.
#[derive(Clone, Copy)]
pub(super) struct RaisedCounter {
    /// Of a u32 that only grows.
    pub(super) address: u64,
    /// By so much in every run.
    pub(super) rise: u32,
}

struct Waits {
    kernel: SignalWait,
    pages: Vec<SignalWaits>,
    records: Vec<(String, WaitRecord)>,
    used: usize,
}

impl CudaSignal {
    /// `setup` has nothing of a run on it.
    pub(super) fn new(setup: &Stream) -> Self {
        let (raises, events) = (Vec::new(), Vec::new());
        let (waits, arrivals) = (None, None);
        Self(Arc::new(Mutex::new(State { setup: setup.clone(), raises, events, used: 0, waits, arrivals })))
    }

    pub(super) fn begin_run(&self) {
        let mut state = lock(&self.0);
        state.raises.clear();
        state.used = 0;
        state.arrivals = None;
        if let Some(waits) = &mut state.waits {
            waits.used = 0;
        }
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
        let mut state = lock(&self.0);
        let enough = state.raises.iter().find(|(raised, _)| *raised >= value).map(|(_, raise)| *raise);
        match enough {
            None => Ok(()),
            Some(Raise::Event(index)) => stream.wait(&state.events[index]),
            Some(Raise::Counter(counter)) => state.wait_for(counter, stream, label, limit),
        }
    }

    /// The first wait for a kernel that gave up, if one did, and its label.
    pub(super) fn missed(&self) -> Option<(String, MissedWait)> {
        let state = lock(&self.0);
        let mut records = state.waits.iter().flat_map(|waits| &waits.records);
        records.find_map(|(label, record)| Some((label.clone(), record.missed()?)))
    }

    /// Whether a Program still has it.
    pub(super) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl State {
    fn wait_for(
        &mut self,
        counter: RaisedCounter,
        stream: &Stream,
        label: &str,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let waits = match &mut self.waits {
            Some(waits) => waits,
            none => {
                let kernel = SignalWait::new(stream.device())?;
                none.insert(Waits { kernel, pages: Vec::new(), records: Vec::new(), used: 0 })
            }
        };
        let index = waits.used;
        if index == waits.records.len() {
            if index == waits.pages.len() * SignalWaits::COUNT {
                waits.pages.push(SignalWaits::new(&self.setup)?);
            }
            waits.records.push((label.to_owned(), WaitRecord::new(stream.device())?));
        }
        let (page, at) = (&waits.pages[index / SignalWaits::COUNT], index % SignalWaits::COUNT);
        // SAFETY: the n-th wait of a run is for the same counter in every run, for a Program's operations are the same, and its kernel
        // has been enqueued before it; kernel, counter and this value belong to the prepared Program, which outlives its runs.
        unsafe {
            waits.kernel.launch(
                stream,
                page,
                at,
                counter.address,
                counter.rise,
                waits.records[index].1.limit(limit),
            )
        }?;
        waits.used += 1;
        Ok(())
    }
}
