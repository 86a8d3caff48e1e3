//! A rank's connection to the store, and what it hears there.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::RendezvousError;
use super::message::{Reply, Request};
use crate::frame::{read_frame, write_frame};
use crate::monitor::{Monitor, lock};
use crate::network::Until;
use crate::remote_ranks::RemoteRanks;
use crate::world::World;
use crate::{ExecError, RankActivity, StoreFault};

/// What only the store, or a reader that does nothing else, must answer.
pub(super) const ANSWER: Duration = Duration::from_secs(2);
/// Between two attempts to write while another thread does.
const PAUSE: Duration = Duration::from_micros(100);

/// A rank's connection to the store, and what it has heard there.
pub(super) struct Connection {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) limit: Duration,
    stream: Arc<TcpStream>,
    /// Held while a message is written, so that none comes into another.
    writing: Mutex<()>,
    next: AtomicU64,
    state: Monitor<State>,
    worlds: Mutex<Vec<Weak<World>>>,
    /// Whether this rank has said farewell: what it hears then ends nothing here.
    has_left: AtomicBool,
}

#[derive(Default)]
struct State {
    answers: BTreeMap<u64, (Reply, Vec<u8>)>,
    /// Questions that wait for an answer, with the place for others that ask where this rank is.
    waits: BTreeMap<u64, Option<String>>,
    failure: Option<ExecError>,
}

impl State {
    /// Nobody waits for the answer to this question any more, which may have come since.
    fn forget(&mut self, id: u64) {
        self.waits.remove(&id);
        self.answers.remove(&id);
    }
}

impl Connection {
    /// Takes over a connection that the store has let in, and starts the thread that listens to it.
    pub(super) fn open(
        rank: usize,
        world_size: usize,
        stream: TcpStream,
        limit: Duration,
    ) -> io::Result<Arc<Self>> {
        let stream = Arc::new(stream);
        let connection = Arc::new(Self {
            rank,
            world_size,
            limit,
            stream: stream.clone(),
            writing: Mutex::default(),
            next: AtomicU64::new(0),
            state: Monitor::new(State::default()),
            worlds: Mutex::default(),
            has_left: AtomicBool::new(false),
        });
        let listening = connection.clone();
        thread::Builder::new()
            .name(format!("rank {rank} rendezvous"))
            .spawn(move || listening.listen(&stream))?;
        Ok(connection)
    }

    /// Closes it, in one direction or both.
    pub(super) fn close(&self, how: Shutdown) {
        self.stream.shutdown(how).ok();
    }

    /// Lets `world` share the job's failures.
    pub(super) fn attach(&self, world: &Arc<World>) {
        let mut worlds = lock(&self.worlds);
        worlds.retain(|known| known.strong_count() > 0 && !std::ptr::eq(known.as_ptr(), Arc::as_ptr(world)));
        worlds.push(Arc::downgrade(world));
        drop(worlds);
        if let Err(error) = self.check() {
            world.fail(error);
        }
    }

    pub(super) fn check(&self) -> Result<(), ExecError> {
        self.state.peek(|state| state.failure.clone()).map_or(Ok(()), Err)
    }

    pub(super) fn say(&self, request: &Request, payload: &[u8], deadline: Instant) -> Result<(), ExecError> {
        self.write(request, payload, deadline).map_err(|error| {
            // What the store said before it went away explains it better.
            self.state.wait_until(
                Instant::now() + ANSWER,
                || false,
                |state| state.failure.as_ref().map(drop),
            );
            let reason = match error.kind() {
                ErrorKind::TimedOut => StoreFault::TakesNothing,
                _ => StoreFault::System { text: error.to_string() },
            };
            self.fail(RendezvousError::Broken { rank: self.rank, reason }.into())
        })
    }

    /// Says something that nothing depends on, if it can be said soon. A store that cannot be reached has gone, and with it the job.
    pub(super) fn mention(&self, request: &Request) {
        self.write(request, &[], Instant::now() + ANSWER).ok();
    }

    /// Says that this rank leaves; whether it had not.
    pub(super) fn say_farewell(&self) -> bool {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.mention(&Request::Leave);
        true
    }

    fn write(&self, request: &Request, payload: &[u8], deadline: Instant) -> io::Result<()> {
        let writing = loop {
            match self.writing.try_lock() {
                Ok(writing) => break writing,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(ErrorKind::TimedOut.into());
                }
                Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
            }
        };
        let written = write_frame(&mut Until { stream: &self.stream, deadline }, request, &[payload]);
        drop(writing);
        written
    }

    /// The answer to a question, or `None` at the deadline.
    pub(super) fn ask(
        &self,
        question: impl FnOnce(u64) -> Request,
        payload: &[u8],
        place: String,
        deadline: Instant,
    ) -> Result<Option<(Reply, Vec<u8>)>, ExecError> {
        self.check()?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.state.update(|state| state.waits.insert(id, Some(place)));
        let said = self.say(&question(id), payload, deadline);
        let answer = said.map(|()| {
            self.state.wait_until(
                deadline,
                || false,
                |state| {
                    // An answer that came before the failure is one.
                    let answer = state.answers.remove(&id).map(Ok);
                    answer.or_else(|| state.failure.clone().map(Err))
                },
            )
        });
        self.state.update(|state| state.forget(id));
        answer?.transpose()
    }

    pub(super) fn fail(&self, error: ExecError) -> ExecError {
        let mut is_first = false;
        let failure = self.state.update(|state| {
            is_first = state.failure.is_none();
            state.failure.get_or_insert(error).clone()
        });
        if is_first {
            self.mention(&Request::Fail { error: failure.clone() });
            self.fail_worlds(&failure);
        }
        failure
    }

    /// What the store said, or what its silence means.
    fn hear_of_failure(&self, error: ExecError) {
        if self.has_left.load(Ordering::Acquire) {
            return;
        }
        let failure = self.state.update(|state| state.failure.get_or_insert(error).clone());
        self.fail_worlds(&failure);
    }

    fn fail_worlds(&self, error: &ExecError) {
        let worlds: Vec<_> = lock(&self.worlds).iter().filter_map(Weak::upgrade).collect();
        worlds.iter().for_each(|world| drop(world.fail(error.clone())));
    }

    /// Everything that the store says, until it closes the connection.
    fn listen(&self, mut stream: &TcpStream) {
        loop {
            match read_frame::<Reply>(&mut stream) {
                Ok(Some((reply, payload))) => self.hear(reply, payload),
                Ok(None) => return self.hear_of_failure(self.lost(0)),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    return self.hear_of_failure(self.lost(0));
                }
                Err(error) => return self.hear_of_failure(broken(self.rank, &error)),
            }
        }
    }

    fn hear(&self, reply: Reply, payload: Vec<u8>) {
        match reply {
            Reply::Value { id }
            | Reply::Unset { id }
            | Reply::Count { id, .. }
            | Reply::Gathered { id, .. }
            | Reply::Missing { id, .. }
            | Reply::Left { id, .. }
            | Reply::Activity { id, .. } => self.state.update(|state| {
                // Nobody takes an answer that comes after the limit.
                if state.waits.contains_key(&id) {
                    state.answers.insert(id, (reply, payload));
                }
            }),
            Reply::Describe { asker, id } => {
                let activity = self.activity();
                self.mention(&Request::Activity { asker, id, activity });
            }
            Reply::Failed { rank, error } => self.hear_of_failure(error.of_rank(rank)),
            Reply::Lost { rank } => self.hear_of_failure(self.lost(rank)),
        }
    }

    fn lost(&self, lost: usize) -> ExecError {
        RendezvousError::Lost { lost, rank: self.rank, doing: self.activity().doing }.into()
    }

    /// What this rank is doing: in its world while it has one, else here.
    fn activity(&self) -> RankActivity {
        let world = lock(&self.worlds).iter().rev().find_map(Weak::upgrade);
        let place = self.state.peek(|state| state.waits.values().flatten().next().cloned());
        match (place, world) {
            (Some(place), _) => RankActivity { doing: format!("it waits at {place}"), waits_for: None },
            (None, Some(world)) => world.activity_of(self.rank),
            (None, None) => RankActivity { doing: "it is between two steps".to_owned(), waits_for: None },
        }
    }
}

impl RemoteRanks for Connection {
    fn rank(&self) -> usize {
        self.rank
    }

    fn notify(&self, error: &ExecError) {
        self.fail(error.clone());
    }

    fn activity_of(&self, rank: usize) -> Option<RankActivity> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.state.update(|state| state.waits.insert(id, None));
        let deadline = Instant::now() + ANSWER;
        let said = self.write(&Request::Ask { id, rank }, &[], deadline);
        let answer = said
            .ok()
            .and_then(|()| self.state.wait_until(deadline, || false, |state| state.answers.remove(&id)));
        self.state.update(|state| state.forget(id));
        match answer {
            Some((Reply::Activity { activity, .. }, _)) => Some(activity),
            _ => None,
        }
    }
}

/// The error of a stream that ends at the store.
pub(super) fn broken(rank: usize, error: &io::Error) -> ExecError {
    RendezvousError::Broken { rank, reason: StoreFault::System { text: error.to_string() } }.into()
}
