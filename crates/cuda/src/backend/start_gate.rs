//! Holding all ranks of a process back until each is enqueued, so that none waits for a peer whose launches come later.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use counterpoint_exec::RunStart;

use crate::kernel::StartHold;
use crate::sync::lock;
use crate::{CudaError, Device, Event, Stream, StreamPriority};

/// What holds the ranks of a process until all of them are enqueued: a kernel that does nothing for a while, which the streams
/// of all ranks wait for. Not a wait for the host, which might itself be held up by a device that waits.
///
/// It lasts longer than enqueueing took lately. A rank that waits for one that is not yet enqueued would make the run longer, which no
/// rank of a training step does, whose host is ahead of its device. Ranks that are processes agree on when it ends
/// ([`Rendezvous::start_together`](counterpoint_exec::Rendezvous::start_together)): each holds its own streams back until then.
pub(crate) struct StartGate {
    hold: Mutex<Option<Hold>>,
    pace: Arc<StartPace>,
}

/// What decides how long ranks are held: for those of a process that waits for others, one for all that it runs, because they agree
/// before it is known what that will be.
#[derive(Default)]
pub(crate) struct StartPace {
    enqueueing: Mutex<Enqueueing>,
    /// Of the next run, where processes have agreed on one.
    agreed: Mutex<Option<RunStart>>,
}

/// How long the host took from the hold to the last call, in the runs before.
#[derive(Default)]
struct Enqueueing {
    since: Option<(Instant, RunIndex)>,
    /// Of what ran for the first time last, which made and uploaded what later runs have: it counts until there is another.
    first: Option<Duration>,
    lately: VecDeque<Duration>,
}

/// How often ranks have run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunIndex {
    First,
    Later,
}

/// On a stream of their own: what else is enqueued to be done at once, such as the mark that a run's times are measured from, must not be
/// held.
struct Hold {
    stream: Stream,
    kernel: StartHold,
    passed: Event,
}

/// Enqueueing up to the first collective takes about so long for each rank: what is known before the first run.
const OF_A_RANK: Duration = Duration::from_micros(40);
/// The host that enqueued longer than this was held up by something else.
const LONGEST: Duration = Duration::from_millis(5);
/// Forwards and backwards may be interleaved, and all that is compared; they take unlike times to enqueue.
const RUNS: usize = 16;

impl StartGate {
    pub(crate) fn new(pace: Arc<StartPace>) -> Self {
        Self { hold: Mutex::default(), pace }
    }

    /// Has what is enqueued on `streams` from now on start together, once there was time to enqueue it. A rank that is alone, and whose
    /// process has agreed on nothing with others, is not held.
    pub(crate) fn hold(&self, device: &Device, ranks: usize, streams: &[&Stream]) -> Result<(), CudaError> {
        let mut hold = lock(&self.hold);
        if !self.pace.holds(ranks) {
            return Ok(());
        }
        let index = if hold.is_none() { RunIndex::First } else { RunIndex::Later };
        let Hold { stream, kernel, passed } = match &mut *hold {
            Some(hold) => hold,
            none => none.insert(Hold {
                stream: Stream::new(device, StreamPriority::High)?,
                kernel: StartHold::new(device)?,
                passed: Event::new(device)?,
            }),
        };
        // As late as can be: what was done before counts.
        kernel.launch(stream, self.pace.begin(ranks, index, Instant::now()))?;
        passed.record(stream)?;
        streams.iter().try_for_each(|stream| stream.wait(passed))
    }

    /// All of the run that was held is enqueued.
    pub(crate) fn enqueued(&self) {
        lock(&self.pace.enqueueing).end();
    }
}

impl StartPace {
    /// How long the rank of this process would have the next run held.
    pub(crate) fn wish(&self) -> Duration {
        lock(&self.enqueueing).hold_of(1)
    }

    /// Has the next run start as was agreed.
    pub(crate) fn agree(&self, start: RunStart) {
        *lock(&self.agreed) = Some(start);
    }

    /// Whether a run of so many ranks is held.
    fn holds(&self, ranks: usize) -> bool {
        ranks > 1 || lock(&self.agreed).is_some()
    }

    /// How long, from `now` on, so many ranks are held.
    fn begin(&self, ranks: usize, index: RunIndex, now: Instant) -> Duration {
        let agreed = lock(&self.agreed).take();
        let mut enqueueing = lock(&self.enqueueing);
        let Some(RunStart { at, hold }) = agreed else {
            enqueueing.since = Some((now, index));
            return enqueueing.hold_of(ranks);
        };
        let hold = hold.min(LONGEST);
        let left = (at + hold).saturating_duration_since(now);
        if left.is_zero() {
            // Something came between that took longer, such as poisoning, on all ranks: they start about when they are through.
            enqueueing.since = Some((now, index));
            return hold;
        }
        enqueueing.since = Some((at, index));
        left
    }
}

impl Enqueueing {
    /// How long so many ranks are to be held.
    fn hold_of(&self, ranks: usize) -> Duration {
        let known = self.lately.iter().max().copied().or(self.first).map(|longest| longest * 3 / 2);
        known.unwrap_or_default().max(OF_A_RANK * ranks as u32).min(LONGEST)
    }

    fn end(&mut self) {
        let Some((since, index)) = self.since.take() else { return };
        if index == RunIndex::First {
            self.first = Some(since.elapsed());
            return;
        }
        if self.lately.len() == RUNS {
            self.lately.pop_front();
        }
        self.lately.push_back(since.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn a_run_is_held_as_long_as_the_last_ones_took() {
        let pace = StartPace::default();
        let held = |lately: &[u64], ranks| {
            lock(&pace.enqueueing).lately = lately.iter().copied().map(micros).collect();
            pace.begin(ranks, RunIndex::Later, Instant::now()).as_micros()
        };
        assert_eq!(held(&[], 2), 80);
        assert_eq!(held(&[400, 800, 300], 2), 1200);
        assert_eq!(held(&[400, 800, 300], 40), 1600);
        assert_eq!(held(&[400, 1_000_000], 2), 5000);
        let line = StartGate::new(Arc::new(pace));
        for _ in 0..=RUNS {
            line.pace.begin(2, RunIndex::Later, Instant::now());
            line.enqueued();
        }
        let lately = || lock(&line.pace.enqueueing).lately.len();
        assert_eq!(lately(), RUNS);
        // Nothing is under way: not counted.
        lock(&line.pace.enqueueing).lately.clear();
        line.enqueued();
        assert_eq!(lately(), 0);
    }

    /// Searches that run hundreds of Programs a few times each would else be held for what is done once.
    #[test]
    fn a_first_run_counts_for_the_next_only() {
        let pace = StartPace::default();
        let run = |index, took: u64| {
            let held = pace.begin(2, index, Instant::now());
            let since = Instant::now().checked_sub(micros(took)).unwrap_or_else(Instant::now);
            lock(&pace.enqueueing).since = Some((since, index));
            lock(&pace.enqueueing).end();
            held
        };
        assert_eq!(run(RunIndex::First, 2_000), OF_A_RANK * 2);
        assert!(run(RunIndex::Later, 100) >= micros(3_000));
        let later = run(RunIndex::Later, 100);
        assert!(later >= micros(150) && later < micros(3_000), "{later:?}");
        // What others have shown is known.
        let first = run(RunIndex::First, 2_000);
        assert!(first >= micros(150) && first < micros(3_000), "{first:?}");
    }

    #[test]
    fn a_rank_alone_is_held_only_where_processes_have_agreed() {
        let pace = StartPace::default();
        assert!(pace.holds(2) && !pace.holds(1));
        let at = Instant::now();
        pace.agree(RunStart { at, hold: micros(300) });
        assert!(pace.holds(1));
        // Whenever a process comes to it, all are held until the same moment.
        assert_eq!(pace.begin(1, RunIndex::Later, at + micros(20)), micros(280));
        assert!(!pace.holds(1));
        pace.agree(RunStart { at, hold: micros(300) });
        assert_eq!(pace.begin(1, RunIndex::Later, at + micros(299)), micros(1));
        // What was agreed has passed, and what others wish is bounded.
        pace.agree(RunStart { at, hold: micros(300) });
        assert_eq!(pace.begin(1, RunIndex::Later, at + micros(300)), micros(300));
        pace.agree(RunStart { at, hold: Duration::MAX });
        assert_eq!(pace.begin(1, RunIndex::Later, at), LONGEST);
    }

    #[test]
    fn a_process_wishes_for_the_time_since_the_start() {
        let pace = StartPace::default();
        assert_eq!(pace.wish(), OF_A_RANK);
        let ago = Instant::now().checked_sub(micros(1000));
        pace.agree(RunStart { at: ago.unwrap_or_else(Instant::now), hold: LONGEST });
        pace.begin(1, RunIndex::Later, Instant::now());
        lock(&pace.enqueueing).end();
        assert!(pace.wish() >= micros(1500) || ago.is_none());
    }
}
