//! What the ranks of a group share: the first error, limits, and who is doing what.

mod activity;
mod faults;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use counterpoint_schedule::StreamKind;

use crate::fault::FaultInjection;
use crate::monitor::{Monitor, Wake, lock};
use crate::remote_ranks::RemoteRanks;
use crate::{ExecError, OpPlace, Stall};

/// How ranks that are threads of this process run.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// Limit of every wait. A wait lasts as long as whatever is awaited, so the limit must be above the longest single
    /// operation, computation included.
    pub limit: Duration,
    /// Fill scratch and output buffers with NaN before each run, so that an element that nobody wrote shows. On by default
    /// where debug assertions are.
    pub poison: bool,
    /// Faults to inject; a test tool.
    pub faults: Vec<FaultInjection>,
    /// Asked about ten times a second by a thread of the caller's that waits for a rank here: a reason to end the group, such as
    /// that its user has interrupted the program.
    pub interrupted: fn() -> Option<String>,
}

impl Default for WorldConfig {
    fn default() -> Self {
        let (limit, poison) = (Duration::from_secs(60), cfg!(debug_assertions));
        Self { limit, poison, faults: Vec::new(), interrupted: || None }
    }
}

/// Between two questions whether the caller is interrupted.
const ATTENTION: Duration = Duration::from_millis(100);

/// What ranks that are threads share: one place for the first error, and who is doing what right now. Every wait goes
/// through it. The first error wins: it wakes every waiter, and from then on every call gives that error.
pub struct World {
    size: usize,
    config: WorldConfig,
    born: Instant,
    failed: AtomicBool,
    failure: Mutex<Option<ExecError>>,
    waiters: Mutex<Vec<Weak<dyn Wake>>>,
    enders: Mutex<Vec<Ender>>,
    streams: Mutex<Vec<Weak<StreamStatus>>>,
    /// Nanoseconds from `born` to the last start or end of an operation of any rank.
    progress: AtomicU64,
    waits: AtomicU64,
    remote: OnceLock<Arc<dyn RemoteRanks>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let failure = self.failure();
        f.debug_struct("World").field("size", &self.size).field("failure", &failure).finish_non_exhaustive()
    }
}

impl World {
    /// A world of `size` ranks.
    ///
    /// # Panics
    /// When `size` is 0.
    pub fn new(size: usize, config: WorldConfig) -> Arc<Self> {
        assert!(size > 0, "a world has at least one rank");
        Arc::new(Self {
            size,
            config,
            born: Instant::now(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            waiters: Mutex::new(Vec::new()),
            enders: Mutex::new(Vec::new()),
            streams: Mutex::new(Vec::new()),
            progress: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            remote: OnceLock::new(),
        })
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// How it runs.
    pub fn config(&self) -> &WorldConfig {
        &self.config
    }

    /// The first error, once there is one.
    pub fn failure(&self) -> Option<ExecError> {
        lock(&self.failure).clone()
    }

    /// Reports an error: it becomes the world's unless another came first, and everyone who waits stops waiting. Returns
    /// the world's error.
    pub fn fail(&self, error: ExecError) -> ExecError {
        let first = lock(&self.failure).get_or_insert(error).clone();
        if !self.failed.swap(true, Ordering::SeqCst) {
            let waiters = lock(&self.waiters).clone();
            waiters.iter().filter_map(Weak::upgrade).for_each(|waiter| waiter.wake());
            if let Some(remote) = self.remote.get() {
                remote.notify(&first);
            }
            std::mem::take(&mut *lock(&self.enders)).into_iter().for_each(|end| end());
        }
        first
    }

    /// Has `end` called on the first error, on the thread that reports it, or now when there is one: to end what no wait on the
    /// host knows of, such as kernels that wait for each other. It must not wait for anyone.
    pub fn when_failed(&self, end: impl FnOnce() + Send + 'static) {
        lock(&self.enders).push(Box::new(end));
        // Whoever failed it just before may have missed this one.
        if self.has_failed() {
            std::mem::take(&mut *lock(&self.enders)).into_iter().for_each(|end| end());
        }
    }

    /// Makes this the world of one rank whose peers are other processes: they hear of its failure, and are asked what they
    /// do. A world stays with the first.
    pub(crate) fn attach(&self, remote: Arc<dyn RemoteRanks>) {
        self.remote.get_or_init(|| remote);
    }

    /// Whether there is an error.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// The world's error, or `Ok` while there is none.
    ///
    /// # Errors
    /// The first error of any rank.
    pub fn check(&self) -> Result<(), ExecError> {
        if self.has_failed() { self.failure().map_or(Ok(()), Err) } else { Ok(()) }
    }

    /// A value to wait on.
    pub(crate) fn monitor<T: Send + 'static>(&self, state: T) -> Arc<Monitor<T>> {
        let monitor = Arc::new(Monitor::new(state));
        let waiter: Arc<dyn Wake> = monitor.clone();
        // A failure that copied the list just before has not woken this one: nobody waits on it yet, and whoever will asks
        // `has_failed` first.
        push_forgetting(&mut lock(&self.waiters), Arc::downgrade(&waiter));
        monitor
    }

    /// Waits on a monitor. The caller turns [`WaitEnd::Limit`] into an error by [`World::stalled`].
    pub(crate) fn wait<T, R>(
        &self,
        monitor: &Monitor<T>,
        deadline: Instant,
        ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, WaitEnd> {
        match monitor.wait_until(deadline, || self.has_failed(), ready) {
            Some(result) => Ok(result),
            None => Err(self.failure().map_or(WaitEnd::Limit, WaitEnd::Failed)),
        }
    }

    /// On the host: sleeps until a monitor's value is `reached`, as long as operations of any rank begin or end within the limit.
    pub(crate) fn wait_while_moving<T>(
        &self,
        rank: usize,
        place: &str,
        monitor: &Monitor<T>,
        reached: impl Fn(&T) -> bool,
        awaited: impl Fn() -> Awaited,
    ) -> Result<(), ExecError> {
        let began = Instant::now();
        // Waits inside operations report better than this one can, so they come first.
        let limit = self.config.limit.saturating_add(self.config.limit / 16);
        let mut asked = began;
        loop {
            let progress = self.last_progress().max(began);
            let deadline = after(progress, limit);
            let pause = deadline.min(Instant::now() + ATTENTION);
            match self.wait(monitor, pause, |value| reached(value).then_some(())) {
                Ok(()) => return self.check(),
                Err(WaitEnd::Failed(error)) => return Err(error),
                Err(WaitEnd::Limit)
                    if Instant::now() < deadline || self.last_progress().max(began) > progress =>
                {
                    self.attend(rank, &mut asked)?;
                }
                Err(WaitEnd::Limit) => {
                    return Err(self.fail(self.stalled(rank, place.to_owned(), progress, awaited())));
                }
            }
        }
    }

    /// Ends the world where its caller is interrupted, whose thread waits for `rank`; looks ten times a second. `asked` is when it
    /// has last looked, or began to wait.
    ///
    /// # Errors
    /// The world's, which the interruption becomes.
    pub fn attend(&self, rank: usize, asked: &mut Instant) -> Result<(), ExecError> {
        let now = Instant::now();
        if now < *asked + ATTENTION {
            return Ok(());
        }
        *asked = now;
        match (self.config.interrupted)() {
            Some(reason) => Err(self.fail(ExecError::GaveUp { rank, reason })),
            None => Ok(()),
        }
    }

    /// The deadline of a wait that begins now.
    pub(crate) fn deadline(&self) -> Instant {
        after(Instant::now(), self.config.limit)
    }

    /// Sleeps until `until` unless the world fails before.
    pub(crate) fn sleep_until(&self, until: Instant) -> Result<(), ExecError> {
        let monitor = self.monitor(());
        match self.wait(&monitor, until, |()| None::<()>) {
            Err(WaitEnd::Failed(error)) => Err(error),
            _ => Ok(()),
        }
    }

    /// How often a rank here has had to wait on the host for what another publishes of its part in a collective: not where that was there.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// One more time.
    pub fn note_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn note_progress(&self) {
        let now = u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.progress.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn last_progress(&self) -> Instant {
        self.born + Duration::from_nanos(self.progress.load(Ordering::Relaxed))
    }

    /// Makes a stream of `rank` known to those who ask what the rank is doing, as long as the status lives.
    pub fn register_stream(&self, rank: usize, name: &str, kind: StreamKind) -> Arc<StreamStatus> {
        let status = Arc::new(StreamStatus::new(rank, name, kind));
        push_forgetting(&mut lock(&self.streams), Arc::downgrade(&status));
        status
    }

    fn streams_of(&self, rank: usize) -> Vec<Arc<StreamStatus>> {
        let streams = lock(&self.streams);
        streams.iter().filter_map(Weak::upgrade).filter(|stream| stream.rank == rank).collect()
    }

    /// What `rank` is doing, all streams, for errors.
    pub(crate) fn activity(&self, rank: usize) -> String {
        let words: Vec<String> = self.streams_of(rank).iter().map(|stream| stream.describe()).collect();
        if words.is_empty() {
            "it has no stream (never started, or gone)".to_owned()
        } else {
            words.join("; ")
        }
    }

    /// Follows the chain of waits from `awaited` to the rank that holds everything up.
    fn culprit(&self, awaited: &Blocker) -> (usize, String) {
        let mut visited: Vec<Arc<StreamStatus>> = Vec::new();
        let mut blocker = awaited.clone();
        loop {
            let stream = match &blocker {
                Blocker::Stream(stream) => stream.clone(),
                Blocker::Rank(rank) => match self.holding_stream(*rank) {
                    None if self.remote.get().is_some_and(|remote| remote.rank() != *rank) => {
                        return self
                            .remote
                            .get()
                            .map_or((*rank, String::new()), |remote| self.remote_culprit(&**remote, *rank));
                    }
                    Some(stream) => stream,
                    None => return (*rank, self.activity(*rank)),
                },
            };
            if visited.iter().any(|seen| Arc::ptr_eq(seen, &stream)) {
                return (stream.rank, format!("in a circle of waits: {}", self.activity(stream.rank)));
            }
            match stream.blocker() {
                Some(next) => blocker = next,
                None => return (stream.rank, stream.describe()),
            }
            visited.push(stream);
        }
    }

    /// Which of these ranks most likely holds up those that wait for all of them: one whose process does not answer, or else one
    /// that waits for nobody.
    pub fn suspect(&self, ranks: &[usize]) -> Option<usize> {
        let remote = self.remote.get();
        let activity = |rank: usize| match remote.filter(|remote| remote.rank() != rank) {
            Some(remote) => remote.activity_of(rank),
            None => Some(self.activity_of(rank)),
        };
        let mut best = None;
        for &rank in ranks {
            match activity(rank) {
                None => return Some(rank),
                Some(activity) if activity.waits_for.is_none() => best = best.or(Some(rank)),
                Some(_) => {}
            }
        }
        best.or_else(|| ranks.first().copied())
    }

    /// The stream that keeps a rank from reaching a collective: the communication it is in, or, when it is in none, the
    /// computation.
    pub(crate) fn holding_stream(&self, rank: usize) -> Option<Arc<StreamStatus>> {
        let busy = |stream: &Arc<StreamStatus>| lock(&stream.state).current.is_some();
        let streams: Vec<_> = self.streams_of(rank).into_iter().filter(busy).collect();
        let communication = streams.iter().find(|stream| stream.kind == StreamKind::Communication);
        communication.or_else(|| streams.first()).cloned()
    }

    /// The error of a wait that reached its limit.
    pub fn stalled(&self, rank: usize, place: String, began: Instant, awaited: Awaited) -> ExecError {
        let waited = began.elapsed();
        let (culprit, culprit_doing) = match &awaited.blocker {
            Some(blocker) => self.culprit(blocker),
            None => (rank, self.activity(rank)),
        };
        ExecError::Stalled(Box::new(Stall {
            rank,
            place,
            awaited: awaited.name,
            waited,
            evidence: awaited.evidence,
            culprit,
            culprit_doing,
        }))
    }
}

/// Called once, on the first error.
type Ender = Box<dyn FnOnce() + Send>;

/// Adds to a list of weak references, forgetting the dead ones before it grows: a world that lives long must not
/// remember everything that ever was.
fn push_forgetting<T: ?Sized>(list: &mut Vec<Weak<T>>, item: Weak<T>) {
    if list.len() == list.capacity() {
        list.retain(|item| item.strong_count() > 0);
        list.reserve(list.len() + 16);
    }
    list.push(item);
}

/// `start + duration`, or a time that never comes.
pub(crate) fn after(start: Instant, duration: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    start.checked_add(duration).unwrap_or(start + NEVER)
}

/// Why a wait ended without what it waited for.
#[derive(Debug)]
pub(crate) enum WaitEnd {
    /// The world failed.
    Failed(ExecError),
    /// The limit was reached.
    Limit,
}

/// What a wait waited for, to say so in an error.
pub struct Awaited {
    /// What it is, such as `rank 5`.
    pub name: String,
    /// The last that was seen of it.
    pub evidence: String,
    /// Who holds it up, where that is known.
    pub blocker: Option<Blocker>,
}

/// Who a stream is blocked by.
#[derive(Clone, Debug)]
pub enum Blocker {
    /// A stream of the same rank, which produces what is awaited.
    Stream(Arc<StreamStatus>),
    /// A rank that has not reached a collective.
    Rank(usize),
}

/// What a stream is doing, for errors.
#[derive(Debug)]
pub struct StreamStatus {
    /// The rank that it belongs to.
    pub rank: usize,
    /// Its name.
    pub name: String,
    kind: StreamKind,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    current: Option<(OpPlace, Instant)>,
    blocked: Option<Blocker>,
    last: Option<OpPlace>,
}

impl StreamStatus {
    /// Of a stream that nobody asks about.
    pub(crate) fn new(rank: usize, name: &str, kind: StreamKind) -> Self {
        Self { rank, name: name.to_owned(), kind, state: Mutex::default() }
    }

    /// Notes that it works on `place` from now on.
    pub fn begin(&self, place: &OpPlace) {
        lock(&self.state).current = Some((place.clone(), Instant::now()));
    }

    /// Notes that it is through with what it began.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        state.blocked = None;
        state.last = state.current.take().map(|(place, _)| place);
    }

    /// Notes who holds this stream up; `None` once nobody does.
    pub(crate) fn block(&self, blocker: Option<Blocker>) {
        lock(&self.state).blocked = blocker;
    }

    /// Who holds this stream up.
    pub(crate) fn blocker(&self) -> Option<Blocker> {
        lock(&self.state).blocked.clone()
    }

    /// Such as ``stream compute is in `attention` (stage 1) for 2.0 s``.
    pub fn describe(&self) -> String {
        let state = lock(&self.state);
        let what = match (&state.current, &state.blocked) {
            (Some((place, since)), blocked) => {
                let verb = if blocked.is_some() { "waits in" } else { "has been in" };
                format!("{verb} {place} for {:.3} s", since.elapsed().as_secs_f64())
            }
            (None, _) => match &state.last {
                Some(last) => format!("has nothing to do after {last}"),
                None => "has not been given anything".to_owned(),
            },
        };
        format!("stream {} {what}", self.name)
    }
}
