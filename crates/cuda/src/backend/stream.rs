//! A rank's streams as the interpreter sees them, with pairs of events where a run's spans are timed.

use std::sync::{Arc, Mutex};

use counterpoint_exec::{OpPlace, StreamStatus};
use counterpoint_schedule::{Span, SpanKind};

use super::clock::RunClock;
use crate::sync::lock;
use crate::{CudaError, Event, Stream};

/// A stream of a rank: a queue of its device, and what is recorded of it.
pub struct CudaStream {
    stream: Stream,
    status: Arc<StreamStatus>,
    measured: Mutex<Measured>,
}

/// Spans of the run, as pairs of events that take the time.
#[derive(Default)]
struct Measured {
    /// Kept from run to run, so that only the first one makes events.
    events: Vec<Event>,
    used: usize,
    spans: Vec<(OpPlace, SpanKind, usize, usize)>,
    /// Of a run whose time is taken as a whole.
    begun: Option<SpanStart>,
}

impl CudaStream {
    pub(super) fn new(stream: Stream, status: Arc<StreamStatus>) -> Self {
        Self { stream, status, measured: Mutex::default() }
    }

    /// The device's queue.
    pub fn queue(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn status(&self) -> &StreamStatus {
        &self.status
    }

    /// Enqueues an operation, between two events that take the time when `timed`.
    pub(crate) fn enqueue<E: From<CudaError>>(
        &self,
        place: &OpPlace,
        kind: SpanKind,
        timed: bool,
        work: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<(), E> {
        self.status.begin(place);
        let start = self.start_span(timed)?;
        work(&self.stream)?;
        self.end_span(place, kind, start)?;
        self.status.end();
        Ok(())
    }

    /// Takes the time of what is enqueued from here on, if that is asked for.
    pub(crate) fn start_span(&self, timed: bool) -> Result<Option<SpanStart>, CudaError> {
        timed.then(|| lock(&self.measured).mark(&self.stream).map(SpanStart)).transpose()
    }

    /// The end of a span, if its time is taken.
    pub(crate) fn end_span(
        &self,
        place: &OpPlace,
        kind: SpanKind,
        start: Option<SpanStart>,
    ) -> Result<(), CudaError> {
        let Some(SpanStart(start)) = start else { return Ok(()) };
        let mut measured = lock(&self.measured);
        let end = measured.mark(&self.stream)?;
        measured.spans.push((place.clone(), kind, start, end));
        Ok(())
    }

    /// Marks where a run begins whose time is taken as a whole.
    pub(super) fn begin_run(&self) -> Result<(), CudaError> {
        let start = self.start_span(true)?;
        lock(&self.measured).begun = start;
        Ok(())
    }

    /// Marks where it ends.
    pub(super) fn end_run(&self) -> Result<(), CudaError> {
        let begun = lock(&self.measured).begun.take();
        let place = OpPlace { index: 0, label: "run".into(), stage: None };
        self.end_span(&place, SpanKind::Compute, begun)
    }

    /// Spans of the run, which has finished.
    pub(super) fn take_spans(
        &self,
        rank: usize,
        index: usize,
        clock: &RunClock,
    ) -> Result<Vec<Span>, CudaError> {
        let mut measured = lock(&self.measured);
        let spans = std::mem::take(&mut measured.spans);
        measured.used = 0;
        let mut taken = Vec::with_capacity(spans.len());
        for (place, kind, start, end) in spans {
            let start = clock.seconds(&measured.events[start])?;
            let end = clock.seconds(&measured.events[end])?.max(start);
            // A wait that found its event passed is none; events are this far apart even then.
            if kind == SpanKind::Wait && end - start < SHORTEST_WAIT {
                continue;
            }
            let (label, stage) = (place.label.to_string(), place.stage);
            taken.push(Span { rank, stream: index, label, kind, stage, start, end });
        }
        Ok(taken)
    }
}

/// The begin of a span: which of the stream's events took the time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpanStart(usize);

/// In seconds.
const SHORTEST_WAIT: f64 = 3e-6;

impl Measured {
    fn mark(&mut self, stream: &Stream) -> Result<usize, CudaError> {
        if self.used == self.events.len() {
            self.events.push(Event::timing(stream.device())?);
        }
        self.events[self.used].record(stream)?;
        self.used += 1;
        Ok(self.used - 1)
    }
}
