//! Signals: what streams raise are events, and words on the device where kernels wait for it themselves; what kernels raise while they run are
//! counters on the device (`counter_waits`).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::counter_waits::{CounterWaits, RaisedCounter};
use crate::kernel::{LinkArrivals, SignalRaise, WaitRecord};
use crate::sync::lock;
use crate::{CudaError, DeviceBuffer, Event, Stream};

/// Words by which kernels hear of what streams raise: one for each value from 1 on, which is not 0 once the signal has been raised to it. The
/// kernel that waits for them lowers them.
#[derive(Clone)]
pub(super) struct ArrivalWords {
    words: DeviceBuffer,
    raise: SignalRaise,
    values: u64,
}

impl ArrivalWords {
    /// For values up to this one.
    pub(super) fn new(setup: &Stream, values: u64) -> Result<Self, CudaError> {
        // And CTAs of the kernel that are through.
        let words = DeviceBuffer::from_slice(setup, &vec![0u32; values as usize + 1])?;
        Ok(Self { words, raise: SignalRaise::new(setup.device())?, values })
    }

    /// Of a value; none of 0, which no one raises.
    pub(super) fn word(&self, value: u64) -> u64 {
        match value {
            0 => 0,
            _ => self.words.address() + (value - 1) * size_of::<u32>() as u64,
        }
    }

    /// Of CTAs that are through.
    pub(super) fn ended(&self) -> u64 {
        self.word(self.values + 1)
    }
}

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
    words: Option<ArrivalWords>,
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
    pub(super) fn new(setup: &Stream, words: Option<ArrivalWords>) -> Self {
        let (raises, events, waits) = (Vec::new(), Vec::new(), CounterWaits::new(setup));
        Self(Arc::new(Mutex::new(State { raises, events, used: 0, waits, words, arrivals: None })))
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
        match &state.words {
            // SAFETY: the words belong to the prepared Program, which outlives its runs.
            Some(ArrivalWords { words, raise, values }) if (1..=*values).contains(&value) => unsafe {
                raise.launch(stream, words, value as usize - 1)
            },
            _ => Ok(()),
        }
    }

    /// Words for a kernel that waits for what streams raise.
    pub(super) fn words(&self) -> Option<ArrivalWords> {
        lock(&self.0).words.clone()
    }

    /// Where a kernel of the operation called `label`, which waits for the words, leaves that it gave up; the same in every run.
    pub(super) fn record_of_words(&self, label: &str, stream: &Stream) -> Result<WaitRecord, CudaError> {
        lock(&self.0).waits.record_inside(label, stream)
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

    /// `stream` goes on once one of the raises by streams that were enqueued and are to at least `value` has happened; at once for 0.
    pub(super) fn wait_for_streams(&self, stream: &Stream, value: u64) -> Result<(), CudaError> {
        let state = lock(&self.0);
        let enough = state.raises.iter().find(|(raised, _)| *raised >= value);
        match enough {
            Some((_, Raise::Event(index))) if value > 0 => stream.wait(&state.events[*index]),
            _ => Ok(()),
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
