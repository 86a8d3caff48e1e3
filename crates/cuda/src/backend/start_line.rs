use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::lock;
use crate::kernel::StartHold;
use crate::{CudaError, Device, Event, Stream, StreamPriority};

/// What holds back the ranks of a process until all of them are enqueued: a kernel that does nothing for a while, which the streams
/// of all ranks wait for. Not a wait for the host, which might itself be held up by a device that waits.
///
/// It lasts longer than enqueueing took lately. A rank that waits for one that is not yet enqueued would make the run longer, which no
/// rank of a training step does, whose host is ahead of its device.
#[derive(Default)]
pub(super) struct StartLine {
    hold: Mutex<Option<Hold>>,
    enqueueing: Mutex<Enqueueing>,
}

/// How long the host took from the hold to the last call, in the runs before.
#[derive(Default)]
struct Enqueueing {
    since: Option<Instant>,
    lately: VecDeque<Duration>,
}

/// On a stream of their own: what else is enqueued to be done at once, such as the mark that a run's times are measured from, must not be
/// held back.
struct Hold {
    stream: Stream,
    kernel: StartHold,
    passed: Event,
}

/// Enqueueing up to the first meeting takes about so long for each rank: what is known before the first run.
const OF_A_RANK: Duration = Duration::from_micros(40);
/// The host that enqueued longer than this was held up by something else.
const LONGEST: Duration = Duration::from_millis(5);
/// Forwards and backwards may take turns, and take unlike times to enqueue.
const RUNS: usize = 6;

impl StartLine {
    /// Has what is enqueued on `streams` from now on start together, once there was time to enqueue it.
    pub(super) fn hold(&self, device: &Device, ranks: usize, streams: &[&Stream]) -> Result<(), CudaError> {
        let mut hold = lock(&self.hold);
        let Hold { stream, kernel, passed } = match &mut *hold {
            Some(hold) => hold,
            none => none.insert(Hold {
                stream: Stream::new(device, StreamPriority::High)?,
                kernel: StartHold::new(device)?,
                passed: Event::new(device)?,
            }),
        };
        kernel.launch(stream, lock(&self.enqueueing).begin(ranks))?;
        passed.record(stream)?;
        streams.iter().try_for_each(|stream| stream.wait(passed))
    }

    /// All of the run that was held back is enqueued.
    pub(super) fn enqueued(&self) {
        lock(&self.enqueueing).end();
    }
}

impl Enqueueing {
    /// How long so many ranks are held back.
    fn begin(&mut self, ranks: usize) -> Duration {
        self.since = Some(Instant::now());
        let known = self.lately.iter().max().map(|longest| *longest * 3 / 2);
        known.unwrap_or_default().max(OF_A_RANK * ranks as u32).min(LONGEST)
    }

    fn end(&mut self) {
        let Some(since) = self.since.take() else { return };
        if self.lately.len() == RUNS {
            self.lately.pop_front();
        }
        self.lately.push_back(since.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_held_as_long_as_the_last_ones_took() {
        let mut enqueueing = Enqueueing::default();
        let mut held = |lately: &[u64], ranks| {
            enqueueing.lately = lately.iter().map(|&micros| Duration::from_micros(micros)).collect();
            enqueueing.begin(ranks).as_micros()
        };
        assert_eq!(held(&[], 2), 80);
        assert_eq!(held(&[400, 800, 300], 2), 1200);
        assert_eq!(held(&[400, 800, 300], 40), 1600);
        assert_eq!(held(&[400, 1_000_000], 2), 5000);
        for _ in 0..=RUNS {
            enqueueing.begin(2);
            enqueueing.end();
        }
        assert_eq!(enqueueing.lately.len(), RUNS);
        // Nothing is under way: not counted.
        enqueueing.lately.clear();
        enqueueing.end();
        assert!(enqueueing.lately.is_empty());
    }
}
