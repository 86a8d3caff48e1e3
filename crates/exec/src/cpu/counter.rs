//! A number that only grows: what events, kernel barriers and signals of the CPU backend are made of.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use counterpoint_schedule::SpanKind;

use super::stream::{CpuStream, StreamShared};
use crate::monitor::{Monitor, lock};
use crate::world::{Awaited, Blocker, StreamStatus, WaitEnd, World};
use crate::{ExecError, OpPlace};

/// A number that only grows, reached on streams and awaited on streams: what events, kernel barriers and signals are made
/// of. The host keeps what it has enqueued (`issued`), the streams what has happened (`reached`); neither is ever reset, so
/// a late reader of an earlier run cannot be misled.
#[derive(Clone)]
pub(crate) struct Counter {
    what: &'static str,
    issued: Arc<Mutex<Issued>>,
    reached: Arc<Monitor<Reached>>,
}

/// What has happened.
#[derive(Default)]
struct Reached {
    value: u64,
    /// Steps that have happened before one with a smaller number has, on another stream.
    ahead: BTreeSet<u64>,
}

impl Reached {
    fn has(&self, target: u64) -> bool {
        self.value >= target || self.ahead.contains(&target)
    }

    fn step(&mut self, number: u64) {
        self.ahead.insert(number);
        while self.ahead.remove(&(self.value + 1)) {
            self.value += 1;
        }
    }
}

#[derive(Default)]
struct Issued {
    value: u64,
    /// Value at the start of the run.
    base: u64,
    /// The stream that was given the last step, and the step's place, for errors.
    by: Option<(Arc<StreamStatus>, OpPlace)>,
}

impl Counter {
    pub(crate) fn new(world: &World, what: &'static str) -> Self {
        Self { what, issued: Arc::default(), reached: world.monitor(Reached::default()) }
    }

    /// From here on values are counted from what has been enqueued so far.
    pub(crate) fn begin_run(&self) {
        let mut issued = lock(&self.issued);
        issued.base = issued.value;
    }

    /// Notes that a step of one is enqueued on `stream`; gives its number.
    pub(crate) fn issue_step(&self, stream: &CpuStream, place: &OpPlace) -> u64 {
        let mut issued = lock(&self.issued);
        issued.value += 1;
        issued.by = Some((stream.status().clone(), place.clone()));
        issued.value
    }

    /// Notes that raising to `value`, counted from the start of the run, is enqueued on `stream`; gives the absolute value.
    pub(crate) fn issue_value(&self, stream: &CpuStream, place: &OpPlace, value: u64) -> u64 {
        let mut issued = lock(&self.issued);
        let absolute = issued.base + value;
        issued.value = issued.value.max(absolute);
        issued.by = Some((stream.status().clone(), place.clone()));
        absolute
    }

    /// The last value enqueued so far.
    pub(crate) fn issued(&self) -> u64 {
        lock(&self.issued).value
    }

    /// `value` counted from the start of the run, as an absolute value.
    pub(crate) fn absolute(&self, value: u64) -> u64 {
        lock(&self.issued).base + value
    }

    /// A step of one happens, whichever.
    pub(crate) fn step(&self) {
        self.reached.update(|reached| reached.value += 1);
    }

    /// The step with this number happens: whoever waits for another, enqueued on another stream, waits on.
    pub(crate) fn step_of(&self, number: u64) {
        self.reached.update(|reached| reached.step(number));
    }

    /// The counter is at least `value` from here on.
    pub(crate) fn raise(&self, value: u64) {
        self.reached.update(|reached| reached.value = reached.value.max(value));
    }

    /// Whether all that is enqueued has happened.
    pub(crate) fn is_reached(&self) -> bool {
        let issued = self.issued();
        self.reached.peek(|reached| reached.has(issued))
    }

    /// On the host: sleeps until all that has been enqueued so far has happened, as long as anything moves.
    pub(crate) fn wait_on_host(&self, world: &World, rank: usize) -> Result<(), ExecError> {
        let (target, by) = {
            let issued = lock(&self.issued);
            (issued.value, issued.by.clone())
        };
        let awaited = || Awaited {
            name: by.as_ref().map_or_else(|| self.what.to_owned(), |(_, place)| place.to_string()),
            evidence: "no operation of any rank began or ended meanwhile".to_owned(),
            blocker: by.as_ref().map(|(status, _)| Blocker::Stream(status.clone())),
        };
        world.wait_while_moving(
            rank,
            "the end of a call",
            &self.reached,
            |reached| reached.has(target),
            awaited,
        )
    }

    /// On a stream's thread: sleeps until the counter has reached the absolute value `target`.
    pub(crate) fn wait(
        &self,
        stream: &StreamShared,
        place: &OpPlace,
        target: u64,
    ) -> Result<Option<SpanKind>, ExecError> {
        if self.reached.peek(|reached| reached.has(target)) {
            return Ok(None);
        }
        let began = Instant::now();
        let by = lock(&self.issued).by.clone();
        let blocker = by.as_ref().map(|(status, _)| Blocker::Stream(status.clone()));
        stream.status.block(blocker.clone());
        let world = &*stream.world;
        let end = world.wait(&self.reached, world.deadline(), |reached| reached.has(target).then_some(()));
        let result = match end {
            Ok(()) => Ok(Some(SpanKind::Wait)),
            Err(WaitEnd::Failed(error)) => Err(error),
            Err(WaitEnd::Limit) => {
                let reached = self.reached.peek(|reached| reached.value);
                let (name, who) = match &by {
                    Some((status, place)) => (
                        format!("{} of stream {} ({place})", self.what, status.name),
                        format!("its {}", status.describe()),
                    ),
                    None => (self.what.to_owned(), "no operation raises it".to_owned()),
                };
                let evidence = format!("it is at {reached} of {target}, and {who}");
                let place = format!("{place} on stream {}", stream.status.name);
                Err(world.stalled(stream.rank, place, began, Awaited { name, evidence, blocker }))
            }
        };
        // After a failure it stays blocked: others whose limits end now must not take this stream for one that works.
        if result.is_ok() {
            stream.status.block(None);
        }
        result
    }
}
