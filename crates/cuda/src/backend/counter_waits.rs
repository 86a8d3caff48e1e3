//! Waits of streams for counters that kernels of other streams raise while they run, with a limit: behind signals and kernel barriers.
//!
//! A counter's wait is a kernel of one thread, enqueued after the kernel that raises it. That kernel depends on nothing that is
//! enqueued after it and runs on the same GPU, so the wait ends on any number of hardware queues: it may hold up what shares one
//! with it, but never what it waits for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::kernel::{MissedWait, SignalWait, SignalWaits, WaitRecord};
use crate::sync::lock;
use crate::{CudaError, Stream};

/// A counter on the device that says how far a kernel has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RaisedCounter {
    /// Of a u32 that only grows.
    pub(crate) address: u64,
    /// By so much in every run.
    pub(crate) rise: u32,
}

/// The waits of one signal or barrier, the same in every run of its Program. A clone is the same.
#[derive(Clone)]
pub(crate) struct CounterWaits(Arc<Mutex<State>>);

struct State {
    setup: Stream,
    kernel: Option<SignalWait>,
    /// Kept from run to run, as the records are, with their operations' labels; how many this run has used.
    pages: Vec<SignalWaits>,
    records: Vec<(String, WaitRecord)>,
    used: usize,
    /// Of a kernel that waits itself, likewise.
    inside: Option<(String, WaitRecord)>,
}

impl CounterWaits {
    /// `setup` has nothing of a run on it.
    pub(super) fn new(setup: &Stream) -> Self {
        let (kernel, pages, records) = (None, Vec::new(), Vec::new());
        Self(Arc::new(Mutex::new(State {
            setup: setup.clone(),
            kernel,
            pages,
            records,
            used: 0,
            inside: None,
        })))
    }

    /// Where a kernel that waits itself, of the operation called `label`, leaves that it gave up.
    pub(super) fn record_inside(&self, label: &str, stream: &Stream) -> Result<WaitRecord, CudaError> {
        let state = &mut *lock(&self.0);
        if let Some((_, record)) = &state.inside {
            return Ok(record.clone());
        }
        let record = WaitRecord::new(stream.device())?;
        state.inside = Some((label.to_owned(), record.clone()));
        Ok(record)
    }

    pub(super) fn begin_run(&self) {
        lock(&self.0).used = 0;
    }

    /// `stream` goes on once `counter` has risen in this run. `label` names the wait in errors; it lasts `limit` at most.
    pub(super) fn wait(
        &self,
        counter: RaisedCounter,
        stream: &Stream,
        label: &str,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let state = &mut *lock(&self.0);
        let index = state.used;
        if index == state.records.len() {
            if index == state.pages.len() * SignalWaits::COUNT {
                state.pages.push(SignalWaits::new(&state.setup)?);
            }
            state.records.push((label.to_owned(), WaitRecord::new(stream.device())?));
        }
        let kernel = match &state.kernel {
            Some(kernel) => kernel,
            None => state.kernel.insert(SignalWait::new(stream.device())?),
        };
        let (page, at) = (&state.pages[index / SignalWaits::COUNT], index % SignalWaits::COUNT);
        // SAFETY: the n-th wait of a run is for the same counter in every run, for a Program's operations are the same, and its kernel
        // has been enqueued before it; kernel, counter and this value belong to the prepared Program, which outlives its runs.
        unsafe {
            kernel.launch(
                stream,
                page,
                at,
                counter.address,
                counter.rise,
                state.records[index].1.limit(limit),
            )
        }?;
        state.used += 1;
        Ok(())
    }

    /// The first wait for a kernel that gave up, if one did, and its label.
    pub(super) fn missed(&self) -> Option<(String, MissedWait)> {
        let state = lock(&self.0);
        let mut records = state.records.iter().chain(&state.inside);
        records.find_map(|(label, record)| Some((label.clone(), record.missed()?)))
    }

    /// Whether a Program still has it.
    pub(super) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}
