//! A stream of the CPU backend: a thread and its queue.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use counterpoint_schedule::{Span, SpanKind, StreamKind};

use crate::monitor::{Monitor, lock};
use crate::panics::panic_message;
use crate::world::{Awaited, Blocker, StreamStatus, World};
use crate::{ExecError, OpPlace};

/// A stream of the CPU backend: a thread fed by a queue. Dropping it lets the thread end once its queue is empty; the
/// thread is never joined, so a stuck operation holds up nobody who waits with a limit.
#[derive(Clone)]
pub struct CpuStream {
    queue: mpsc::Sender<Job>,
    shared: Arc<StreamShared>,
}

/// What an operation can use of the stream that it runs on.
pub(crate) struct StreamShared {
    pub(crate) world: Arc<World>,
    pub(crate) rank: usize,
    pub(crate) status: Arc<StreamStatus>,
    queued: Arc<Monitor<Queued>>,
    measured: Mutex<Vec<Measured>>,
    /// Waits inside the operation under way.
    pauses: Mutex<Vec<[Instant; 2]>>,
}

#[derive(Debug, Default)]
struct Queued {
    given: u64,
    done: u64,
}

struct Measured {
    place: OpPlace,
    kind: SpanKind,
    start: Instant,
    end: Instant,
}

/// What an operation does on the stream's thread. `Ok(Some(kind))` asks for a span.
type Work = Box<dyn FnOnce(&StreamShared) -> Result<Option<SpanKind>, ExecError> + Send>;

/// What an operation belongs to.
#[derive(Clone, Default)]
pub(crate) struct ProgramPart {
    /// The Program, where it is a run's: what faults are looked for by.
    pub(crate) program: Option<Arc<str>>,
    /// Whether its times are collected.
    pub(crate) is_timed: bool,
}

struct Job {
    part: ProgramPart,
    place: OpPlace,
    work: Work,
}

impl CpuStream {
    pub(crate) fn new(
        world: &Arc<World>,
        rank: usize,
        name: &str,
        kind: StreamKind,
    ) -> Result<Self, ExecError> {
        let shared = Arc::new(StreamShared {
            world: world.clone(),
            rank,
            status: world.register_stream(rank, name, kind),
            queued: world.monitor(Queued::default()),
            measured: Mutex::default(),
            pauses: Mutex::default(),
        });
        let (queue, jobs) = mpsc::channel();
        let worker = shared.clone();
        std::thread::Builder::new()
            .name(format!("rank {rank} {name}"))
            .spawn(move || worker.work(&jobs))
            .map_err(|error| ExecError::Thread { rank, stream: name.to_owned(), text: error.to_string() })?;
        Ok(Self { queue, shared })
    }

    pub(crate) fn status(&self) -> &Arc<StreamStatus> {
        &self.shared.status
    }

    pub(crate) fn push(
        &self,
        part: ProgramPart,
        place: &OpPlace,
        work: impl FnOnce(&StreamShared) -> Result<Option<SpanKind>, ExecError> + Send + 'static,
    ) -> Result<(), ExecError> {
        self.shared.world.check()?;
        self.shared.queued.update(|queued| queued.given += 1);
        let job = Job { part, place: place.clone(), work: Box::new(work) };
        // The thread and its receiver live as long as this sender: sending cannot fail.
        self.queue.send(job).ok();
        Ok(())
    }

    /// Sleeps until everything that was pushed before has finished.
    pub(crate) fn synchronize(&self) -> Result<(), ExecError> {
        let shared = &*self.shared;
        let target = shared.queued.peek(|queued| queued.given);
        let awaited = || Awaited {
            name: format!("its own stream {}", shared.status.name),
            evidence: "no operation of any rank began or ended meanwhile".to_owned(),
            blocker: Some(Blocker::Stream(shared.status.clone())),
        };
        let place = "the end of a run";
        shared.world.wait_while_moving(shared.rank, place, &shared.queued, |q| q.done >= target, awaited)
    }

    /// Sleeps until everything that was pushed before has finished or was left out after a failure. Whether it has by `deadline`.
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        let target = self.shared.queued.peek(|queued| queued.given);
        let finished = |queued: &mut Queued| (queued.done >= target).then_some(());
        self.shared.queued.wait_until(deadline, || false, finished).is_some()
    }

    /// Spans measured since the last call, in seconds since `origin`.
    pub(crate) fn take_spans(&self, origin: Instant, stream: usize) -> Vec<Span> {
        let seconds = |at: Instant| at.saturating_duration_since(origin).as_secs_f64();
        let measured = std::mem::take(&mut *lock(&self.shared.measured));
        measured
            .into_iter()
            .map(|m| Span {
                rank: self.shared.rank,
                stream,
                label: m.place.label.to_string(),
                kind: m.kind,
                stage: m.place.stage,
                start: seconds(m.start),
                end: seconds(m.end),
            })
            .collect()
    }
}

impl StreamShared {
    /// Notes that the operation under way has waited since `began`.
    pub(crate) fn paused_since(&self, began: Instant) {
        lock(&self.pauses).push([began, Instant::now()]);
    }

    /// Keeps the times of an operation, its waits apart from what it did between them.
    fn keep(&self, place: &OpPlace, kind: SpanKind, [start, end]: [Instant; 2], pauses: &[[Instant; 2]]) {
        let mut measured = lock(&self.measured);
        let mut span = |kind, start, end| measured.push(Measured { place: place.clone(), kind, start, end });
        let mut from = start;
        for &[began, ended] in pauses {
            span(kind, from, began);
            span(SpanKind::Wait, began, ended);
            from = ended;
        }
        span(kind, from, end);
    }

    fn work(&self, jobs: &mpsc::Receiver<Job>) {
        let mut occurrences: HashMap<usize, u64> = HashMap::new();
        for job in jobs {
            // After a failure the queue is emptied without doing anything.
            if !self.world.has_failed() {
                self.perform(job, &mut occurrences);
            }
            self.world.note_progress();
            self.queued.update(|queued| queued.done += 1);
        }
    }

    fn perform(&self, job: Job, occurrences: &mut HashMap<usize, u64>) {
        let Job { part: ProgramPart { program, is_timed }, place, work } = job;
        self.status.begin(&place);
        self.world.note_progress();
        let faults = self.world.config().faults.iter();
        let faults: Vec<_> =
            faults.filter(|fault| fault.strikes(self.rank, program.as_deref(), &place)).collect();
        if !faults.is_empty() {
            let occurrence = occurrences.entry(place.index).or_default();
            *occurrence += 1;
            faults.iter().for_each(|fault| fault.delay_start(&place, *occurrence));
        }
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| {
            faults.iter().for_each(|fault| fault.strike());
            work(self)
        }));
        let end = Instant::now();
        let pauses = std::mem::take(&mut *lock(&self.pauses));
        match result {
            Ok(Ok(Some(kind))) if is_timed => self.keep(&place, kind, [start, end], &pauses),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => drop(self.world.fail(error)),
            Err(panic) => {
                let place = format!("{place} on stream {}", self.status.name);
                let message = panic_message(&*panic);
                self.world.fail(ExecError::RankPanicked { rank: self.rank, place, message });
            }
        }
        self.status.end();
    }
}
