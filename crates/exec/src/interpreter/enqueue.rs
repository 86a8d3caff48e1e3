//! How the runs of a process's ranks are put on their streams: operation by operation, all ranks from one thread.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use super::Prepared;
use super::steps::{PlacedStep, Step};
use crate::profiler::ProfilerRange;
use crate::{Backend, CollectiveCall, ExecError, OpPlace, RunContext, RunTimes, TensorFault, Transport};

/// Enqueues what every rank has before its next collective, then that collective's steps, each for all ranks, and so on. A
/// computation of each rank in turn, so that all ranks start together.
pub(super) fn enqueue_all<B: Backend, T: Transport<B>>(
    queues: &mut [Enqueue<'_, B, T>],
) -> Result<(), ExecError> {
    queues.iter().try_for_each(Enqueue::announce)?;
    if let [queue] = queues {
        return queue.enqueue_alone();
    }
    loop {
        let mut calls: Vec<Option<PendingCall<'_, B, T>>> = queues.iter().map(|_| None).collect();
        let mut under_way: Vec<usize> = (0..queues.len()).collect();
        while !under_way.is_empty() {
            let mut left = Vec::with_capacity(under_way.len());
            for rank in under_way {
                match queues[rank].advance()? {
                    Reached::Computation => left.push(rank),
                    Reached::Collective(pending) => calls[rank] = Some(pending),
                    Reached::End => {}
                }
            }
            under_way = left;
        }
        let calls = queues.iter().zip(calls).filter_map(|(queue, call)| Some((queue, call?)));
        let mut calls: Vec<_> = calls.collect();
        if calls.is_empty() {
            return Ok(());
        }
        calls.iter_mut().try_for_each(|(queue, pending)| queue.fetch(pending))?;
        calls.into_iter().try_for_each(|(queue, pending)| queue.end(pending))?;
    }
}

/// A profiler's range of a run or a call of these ranks, around those of their operations. Ranks are enqueued by one thread, whose ranges
/// nest: so it is one range.
pub(super) fn range_of_ranks<'a, B: Backend + 'a, T: Transport<B> + 'a>(
    ranks: impl Iterator<Item = &'a Prepared<B, T>> + Clone,
) -> ProfilerRange<'a> {
    let first = ranks.clone().next();
    ProfilerRange::begin(first.and_then(|rank| rank.backend().profiler()), || {
        let name = first.map_or("", |rank| &rank.program().name);
        let numbers: Vec<String> = ranks.map(|rank| rank.backend().rank().to_string()).collect();
        format!("{name}, rank {}", numbers.join(", "))
    })
}

/// A rank's run that is being enqueued.
pub(super) struct Enqueue<'a, B: Backend, T: Transport<B>> {
    rank: &'a Prepared<B, T>,
    /// Every buffer of the Program.
    table: Cow<'a, [B::Buffer]>,
    /// Every stream.
    streams: &'a [Arc<B::Stream>],
    /// Index of the first step that is not yet enqueued whole.
    next: usize,
}

impl<'a, B: Backend, T: Transport<B>> Enqueue<'a, B, T> {
    /// A run over the buffers that are bound.
    pub(super) fn of_bound(rank: &'a Prepared<B, T>) -> Result<Self, ExecError> {
        let mut named = rank.program.buffers.iter().zip(&rank.buffers);
        if let Some((spec, _)) = named.find(|(_, buffer)| buffer.is_none()) {
            return Err(rank.backend().fail(ExecError::tensor(&spec.name, TensorFault::NeverBound)));
        }
        let table = rank.buffers.iter().flatten().cloned().collect();
        Ok(Self { rank, table: Cow::Owned(table), streams: &rank.streams, next: 0 })
    }

    /// A run over these buffers, on these streams.
    pub(super) fn of_table(
        rank: &'a Prepared<B, T>,
        table: &'a [B::Buffer],
        streams: &'a [Arc<B::Stream>],
    ) -> Self {
        Self { rank, table: Cow::Borrowed(table), streams, next: 0 }
    }

    /// A profiler's range of an operation, by the name that timelines have.
    fn range(&self, place: &'a OpPlace) -> ProfilerRange<'a> {
        ProfilerRange::begin(self.rank.backend().profiler(), || &*place.label)
    }

    /// Notifies the backend of it.
    pub(super) fn begin(self, origin: Instant, times: RunTimes) -> Result<Self, ExecError> {
        let Prepared { program, barriers, signals, .. } = self.rank;
        let run = RunContext { program: &program.name, policy: &program.policy, origin, times };
        let backend = self.rank.backend();
        backend.begin_run(&run, barriers, signals).map_err(|error| backend.fail(error))?;
        Ok(self)
    }

    /// Announces to the peers all collectives of the run that they do not know.
    fn announce(&self) -> Result<(), ExecError> {
        let Prepared { rank, barriers, signals, steps, .. } = self.rank;
        let (backend, transport) = (rank.backend(), rank.transport());
        let mut between = 0;
        for PlacedStep { place, stream, step } in steps {
            let Step::Collective { collective, arrive, signal } = step else { continue };
            let (stream, buffers) = (&*self.streams[*stream], &self.table[..]);
            let barrier = arrive.map(|barrier| &barriers[barrier]);
            let signal = signal.map(|signal| &signals[signal]);
            let call = CollectiveCall { backend, stream, place, collective, buffers, barrier, signal };
            transport.announce(&call, between).map_err(|error| backend.fail(error))?;
            between += 1;
        }
        Ok(())
    }

    /// Enqueues all that is left of the run of the only rank here.
    fn enqueue_alone(&mut self) -> Result<(), ExecError> {
        loop {
            match self.advance()? {
                Reached::Computation => {}
                Reached::Collective(mut pending) => {
                    self.fetch(&mut pending)?;
                    self.end(pending)?;
                }
                Reached::End => return Ok(()),
            }
        }
    }

    /// Enqueues operations up to the next computation, which is, or the next collective, which it begins.
    fn advance(&mut self) -> Result<Reached<'a, B, T>, ExecError> {
        let Prepared { rank, events, barriers, signals, steps, .. } = self.rank;
        let (backend, transport) = (rank.backend(), rank.transport());
        let mut enqueue = || {
            while let Some(PlacedStep { place, stream, step }) = steps.get(self.next) {
                let stream: &'a B::Stream = &self.streams[*stream];
                self.next += 1;
                let _range = self.range(place);
                match step {
                    Step::Compute(kernel) => {
                        backend.launch(stream, place, kernel, &self.table, signals)?;
                        return Ok(Reached::Computation);
                    }
                    Step::Collective { collective, arrive, signal } => {
                        let barrier = arrive.map(|barrier| &barriers[barrier]);
                        let signal = signal.map(|signal| &signals[signal]);
                        let buffers = &self.table[..];
                        let call =
                            CollectiveCall { backend, stream, place, collective, buffers, barrier, signal };
                        let pending = transport.begin(&call)?;
                        let pending = PendingCall { place, stream, collective, barrier, signal, pending };
                        return Ok(Reached::Collective(pending));
                    }
                    Step::Record(event) => backend.record(stream, place, &events[*event])?,
                    Step::Wait(event) => backend.wait(stream, place, &events[*event])?,
                    Step::Await { barrier, arrivals } => {
                        backend.await_barrier(stream, place, &barriers[*barrier], *arrivals)?;
                    }
                    Step::Signal { signal, value } => {
                        backend.signal(stream, place, &signals[*signal], *value)?;
                    }
                    Step::WaitSignal { signal, value } => {
                        backend.wait_signal(stream, place, &signals[*signal], *value)?;
                    }
                }
            }
            Ok(Reached::End)
        };
        enqueue().map_err(|error| backend.fail(error))
    }

    fn fetch(&self, pending: &mut PendingCall<'a, B, T>) -> Result<(), ExecError> {
        let (backend, transport) = (self.rank.rank.backend(), self.rank.rank.transport());
        let PendingCall { place, stream, collective, barrier, signal, ref mut pending } = *pending;
        let buffers = &self.table[..];
        let call = CollectiveCall { backend, stream, place, collective, buffers, barrier, signal };
        let _range = self.range(place);
        transport.fetch(&call, pending).map_err(|error| backend.fail(error))
    }

    fn end(&self, pending: PendingCall<'a, B, T>) -> Result<(), ExecError> {
        let (backend, transport) = (self.rank.rank.backend(), self.rank.rank.transport());
        let PendingCall { place, stream, collective, barrier, signal, pending } = pending;
        let buffers = &self.table[..];
        let call = CollectiveCall { backend, stream, place, collective, buffers, barrier, signal };
        let _range = self.range(place);
        transport.end(&call, pending).map_err(|error| backend.fail(error))
    }
}

/// How far a rank's run has been enqueued.
enum Reached<'a, B: Backend, T: Transport<B>> {
    /// Behind a computation.
    Computation,
    /// Within a collective.
    Collective(PendingCall<'a, B, T>),
    End,
}

/// A collective that a rank has begun.
struct PendingCall<'a, B: Backend, T: Transport<B>> {
    place: &'a OpPlace,
    stream: &'a B::Stream,
    collective: &'a T::Collective,
    barrier: Option<&'a B::Barrier>,
    signal: Option<&'a B::Signal>,
    pending: T::Pending,
}
