//! Calls that go ahead of what the other ranks publish. A rank that knows all it needs of a collective before it calls it does not wait until
//! the others have called it too: whether they call the same is looked at later, by the next calls or else by a thread, which ends the world
//! with the words that the call would have given.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use counterpoint_schedule::StreamKind;

use super::board::{Board, Payload, Post};
use super::waiter::{Listener, Waiter};
use crate::monitor::lock;
use crate::world::{StreamStatus, World};
use crate::{CollectiveDifference, ExecError, OpPlace};

/// Between two looks of the thread, while something is open; and while nothing is, but was not long ago: masks come one after the other, and
/// to wake a thread that sleeps for good would take a call longer than all else of its check.
const NAP: Duration = Duration::from_millis(1);
const DOZE: Duration = Duration::from_millis(10);
/// How long after the last open check the thread sleeps for good.
const AWAKE: Duration = Duration::from_secs(2);

/// The checks of one rank's calls that are still open.
pub struct LateChecks<P: Payload> {
    shared: Arc<Shared<P>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared<P: Payload> {
    world: Arc<World>,
    board: Arc<Board<P>>,
    rank: usize,
    listener: Arc<dyn Listener + Send + Sync>,
    fits: fn(&P, &P) -> Result<(), CollectiveDifference>,
    status: StreamStatus,
    state: Mutex<State<P>>,
    /// Of `state`, for who has nothing to look at.
    count: AtomicUsize,
    changed: Condvar,
}

struct State<P: Payload> {
    open: Vec<Open<P>>,
    has_ended: bool,
    /// Whether the thread looks again by itself.
    is_watched: bool,
}

/// A call whose peers have not all been heard of.
struct Open<P: Payload> {
    sequence: u64,
    own: Arc<Post<P>>,
    peers: Vec<usize>,
    began: Instant,
    /// Whether the rank is through with it.
    is_finished: bool,
}

impl<P: Payload> LateChecks<P> {
    /// Of `rank`, to whose `board` what others publish comes through `listener`. Besides what [`Post::check_peer`] compares, payloads of one
    /// collective must fit: the own one comes first.
    pub fn new(
        world: &Arc<World>,
        board: &Arc<Board<P>>,
        rank: usize,
        listener: Arc<dyn Listener + Send + Sync>,
        fits: fn(&P, &P) -> Result<(), CollectiveDifference>,
    ) -> Self {
        let status = StreamStatus::new(rank, "checks of calls", StreamKind::Communication);
        let state = Mutex::new(State { open: Vec::new(), has_ended: false, is_watched: false });
        let (world, board, count, changed) =
            (world.clone(), board.clone(), AtomicUsize::new(0), Condvar::new());
        let shared = Shared { world, board, rank, listener, fits, status, state, count, changed };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }

    /// This rank has published `own` in collective `sequence` and goes on: that each of `peers` calls the same is checked later.
    pub fn open(&self, sequence: u64, own: Arc<Post<P>>, peers: Vec<usize>) {
        let open = Open { sequence, own, peers, began: Instant::now(), is_finished: false };
        lock(&self.shared.state).open.push(open);
        self.shared.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Looks at what has come, without waiting; not where the thread does so by itself.
    ///
    /// # Errors
    /// As [`Post::check_peer`]; [`ExecError::Left`]; [`ExecError::Stalled`] where a peer has not come within the limit. They end the world.
    pub fn look(&self) -> Result<(), ExecError> {
        if self.shared.count.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        match self.shared.state.try_lock() {
            Ok(state) if state.is_watched => Ok(()),
            Ok(state) => self.shared.look_in(state),
            Err(TryLockError::Poisoned(poisoned)) => self.shared.look_in(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Ok(()),
        }
    }

    /// As [`Board::finish`] of this rank: what others publish of the collective stays on the board until its check is over, which a thread sees
    /// to from now on.
    pub fn finish(&self, sequence: u64, place: &OpPlace) {
        let mut is_open = false;
        if self.shared.count.load(Ordering::Relaxed) > 0 {
            let mut state = lock(&self.shared.state);
            if let Some(open) = state.open.iter_mut().find(|open| open.sequence == sequence) {
                (open.is_finished, is_open) = (true, true);
                let is_watched = state.is_watched;
                drop(state);
                if !is_watched {
                    self.wake();
                }
            }
        }
        if !is_open {
            self.shared.board.finish(self.shared.rank, sequence, place);
        }
    }

    fn wake(&self) {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let name = format!("rank {} checks", shared.rank);
            let spawned = thread::Builder::new().name(name).spawn(move || shared.watch());
            // Without a thread the calls that follow look.
            *thread = spawned.ok();
        }
        self.shared.changed.notify_one();
    }
}

impl<P: Payload> Drop for LateChecks<P> {
    fn drop(&mut self) {
        lock(&self.shared.state).has_ended = true;
        self.shared.changed.notify_one();
        // It never waits for anyone.
        if let Some(thread) = lock(&self.thread).take() {
            thread.join().ok();
        }
    }
}

impl<P: Payload> Shared<P> {
    /// Looks for as long as something is open, until it is to end.
    fn watch(&self) {
        let mut last_open = Instant::now();
        let mut state = lock(&self.state);
        while !state.has_ended {
            if !state.open.is_empty() {
                last_open = Instant::now();
            }
            drop(state);
            // Its error is the world's.
            self.look().ok();
            self.board.tidy();
            state = lock(&self.state);
            if state.has_ended {
                break;
            }
            let nap = if state.open.is_empty() { DOZE } else { NAP };
            state.is_watched = !state.open.is_empty() || last_open.elapsed() < AWAKE;
            state = match state.is_watched {
                true => self.changed.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0,
                false => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn look(&self) -> Result<(), ExecError> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        self.look_in(lock(&self.state))
    }

    fn look_in(&self, mut state: MutexGuard<'_, State<P>>) -> Result<(), ExecError> {
        let looked = if self.world.has_failed() {
            state.open.clear();
            Ok(())
        } else {
            state.open.iter_mut().try_for_each(|open| self.look_at(open))
        };
        let over: Vec<Open<P>> = state.open.extract_if(.., |open| open.peers.is_empty()).collect();
        if looked.is_err() {
            state.open.clear();
        }
        self.count.store(state.open.len(), Ordering::Relaxed);
        drop(state);
        for open in over.into_iter().filter(|open| open.is_finished) {
            self.board.finish(self.rank, open.sequence, &open.own.place);
        }
        looked.map_err(|error| self.world.fail(error))
    }

    /// Takes those of its peers from an open call that call the same.
    fn look_at(&self, open: &mut Open<P>) -> Result<(), ExecError> {
        let Open { sequence, own, peers, began, .. } = open;
        while let Some(&peer) = peers.last() {
            let waiter = Waiter {
                rank: self.rank,
                place: &own.place,
                status: &self.status,
                polls: Duration::ZERO,
                listener: Some(&*self.listener),
            };
            let Some(post) = self.board.found(&self.world, &waiter, peer, *sequence, *began)? else {
                return Ok(());
            };
            own.check_peer(self.rank, *sequence, peer, &post)?;
            (self.fits)(&own.payload, &post.payload).map_err(|difference| ExecError::CollectiveMismatch {
                rank: self.rank,
                peer,
                sequence: *sequence,
                collective: own.place.to_string(),
                reason: Box::new(difference),
            })?;
            peers.pop();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorldConfig;
    use crate::collective::{Collective, Contract, Pattern};

    /// Of a collective with this number.
    struct Number(u64);

    impl Payload for Number {
        fn spent(&self) -> Self {
            Self(self.0)
        }
    }

    fn fits(own: &Number, other: &Number) -> Result<(), CollectiveDifference> {
        let (own, other) = (own.0, other.0);
        if own == other { Ok(()) } else { Err(CollectiveDifference::Preparations { own, other }) }
    }

    /// What rank 1 has written and nobody has taken in.
    #[derive(Default)]
    struct Written(Mutex<Vec<(u64, Post<Number>)>>, Mutex<Option<Arc<Board<Number>>>>);

    impl Listener for Written {
        fn listen(&self, peer: usize) -> bool {
            if let Some(board) = &*lock(&self.1) {
                for (sequence, post) in lock(&self.0).drain(..) {
                    board.publish(peer, sequence, post, &[]);
                }
            }
            true
        }
    }

    struct Case {
        world: Arc<World>,
        board: Arc<Board<Number>>,
        written: Arc<Written>,
        checks: LateChecks<Number>,
    }

    fn post(label: &str, number: u64) -> Post<Number> {
        let contract = Contract { kind: "group_cast".to_owned(), tensors: Vec::new(), plan: None };
        let (tensors, reduction, delivery_parts) = (Vec::new(), None, None);
        let pattern = Pattern::default();
        let collective = Arc::new(Collective { contract, pattern, tensors, reduction, delivery_parts });
        let (place, at) = (OpPlace::new(0, label), Instant::now());
        Post { place, collective, at, payload: Number(number) }
    }

    /// Rank 0, which has gone ahead with its first collective.
    fn ahead(limit: Duration) -> Case {
        let world = World::new(2, WorldConfig { limit, ..WorldConfig::default() });
        let board = Arc::new(Board::of_rank(&world, 0));
        let written = Arc::<Written>::default();
        *lock(&written.1) = Some(board.clone());
        let checks = LateChecks::new(&world, &board, 0, written.clone(), fits);
        let own = board.publish(0, 0, post("cast k v", 7), &[]);
        checks.open(0, own, vec![1]);
        checks.look().unwrap();
        checks.finish(0, &OpPlace::new(0, "cast k v"));
        Case { world, board, written, checks }
    }

    const LONG: Duration = Duration::from_secs(60);

    /// Until something that a thread does is done.
    fn soon<T>(done: impl Fn() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(done) = done() {
                return done;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "it was not done");
            thread::sleep(NAP);
        }
    }

    #[test]
    fn a_peer_that_calls_something_else_is_named_though_nobody_calls() {
        let (other, again) = (post("reduce dk dv", 7), post("cast k v", 9));
        for (theirs, word) in
            [(other, "reduce dk dv"), (again, "as the 7th of this rank, and as the 9th of the other")]
        {
            let case = ahead(LONG);
            lock(&case.written.0).push((0, theirs));
            let error = soon(|| case.world.failure()).to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    /// The thread looks again by itself for a while after the last check, so that checks of the masks that follow need not wake it.
    #[test]
    fn a_later_call_is_checked_by_a_thread_that_need_not_be_woken() {
        let case = ahead(LONG);
        lock(&case.written.0).push((0, post("cast k v", 7)));
        soon(|| (case.checks.shared.count.load(Ordering::Relaxed) == 0).then_some(()));
        soon(|| lock(&case.checks.shared.state).is_watched.then_some(()));
        let own = case.board.publish(0, 1, post("reduce dk dv", 8), &[]);
        case.checks.open(1, own, vec![1]);
        case.checks.finish(1, &OpPlace::new(1, "reduce dk dv"));
        lock(&case.written.0).push((1, post("cast k v", 8)));
        let error = soon(|| case.world.failure()).to_string();
        assert!(error.contains("reduce dk dv"), "{error}");
    }

    #[test]
    fn a_peer_that_does_not_come_or_leaves_is_named() {
        let case = ahead(Duration::from_millis(50));
        let error = soon(|| case.world.failure());
        assert!(matches!(&error, ExecError::Stalled(stall) if stall.awaited == "rank 1"), "{error}");
        let case = ahead(LONG);
        case.board.leave(1, 0);
        let error = soon(|| case.world.failure());
        assert!(matches!(error, ExecError::Left { left: 1, rank: 0, .. }), "{error}");
    }

    /// Else its part would be gone from the board when it is looked at: parts of what a rank is through with are dropped as others come.
    #[test]
    fn a_part_that_comes_late_is_there_until_it_is_looked_at() {
        let case = ahead(LONG);
        for sequence in 1..100 {
            case.board.publish(0, sequence, post("cast k v", 7), &[]);
            case.board.publish(1, sequence, post("cast k v", 7), &[]);
            case.checks.finish(sequence, &OpPlace::new(0, "cast k v"));
        }
        assert_eq!((case.board.kept(1), case.world.failure()), (99, None));
        lock(&case.written.0).push((0, post("cast k v", 7)));
        soon(|| (case.checks.shared.count.load(Ordering::Relaxed) == 0).then_some(()));
        case.checks.look().unwrap();
        for sequence in 100..200 {
            case.board.publish(1, sequence, post("cast k v", 7), &[]);
            case.checks.finish(sequence, &OpPlace::new(0, "cast k v"));
        }
        // Not those that publish: the thread.
        soon(|| (case.board.kept(1) < 99).then_some(()));
        assert_eq!(case.world.failure(), None);
    }

    #[test]
    fn what_is_open_keeps_nobody_who_drops() {
        let began = Instant::now();
        drop(ahead(LONG));
        assert!(began.elapsed() < Duration::from_secs(5));
    }
}
