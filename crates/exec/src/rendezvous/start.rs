//! Ranks that are processes start a timed run at one moment.

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{Rendezvous, RendezvousError};
use crate::{ExecError, StoreFault};

/// What ranks that are processes have agreed on for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunStart {
    /// When it begins here. Ranks of one host have the same moment, but for those who heard of it later.
    pub at: Instant,
    /// For how long from then on devices are held: the longest that any rank wished for.
    pub hold: Duration,
}

/// Between the coming of the last rank and the start: enough for the message to reach all of them. Three ranks on two cores had it after
/// 0.13 to 0.22 ms. Who hears of it later starts at once.
const MARGIN: Duration = Duration::from_millis(1);

/// What a rank sends the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arrival {
    /// Nanoseconds since the epoch by its host's clock, which all processes of a host share, in containers too.
    at: u64,
    /// How long it wishes devices to be held, in nanoseconds.
    wish: u64,
}

impl Arrival {
    fn to_bytes(self) -> Vec<u8> {
        [self.at.to_le_bytes(), self.wish.to_le_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (at, wish) = bytes.split_first_chunk()?;
        Some(Self { at: u64::from_le_bytes(*at), wish: u64::from_le_bytes(wish.try_into().ok()?) })
    }
}

impl Rendezvous {
    /// Returns once all ranks have come, those of one host at one moment; clocks of several hosts cannot be compared. `wish` is how long
    /// this rank would have devices held, so that there is time to enqueue the run.
    ///
    /// # Errors
    /// As [`Rendezvous::all_gather`].
    pub fn start_together(&self, place: &str, wish: Duration) -> Result<RunStart, ExecError> {
        let own = Arrival { at: clock(), wish: nanoseconds(wish) };
        let all = self.all_gather(place, &own.to_bytes())?;
        let all: Option<Vec<Arrival>> = all.iter().map(|one| Arrival::from_bytes(one)).collect();
        let all = all.ok_or_else(|| {
            self.fail(RendezvousError::Broken { rank: self.rank(), reason: StoreFault::PartOfStart }.into())
        })?;
        let (start, hold) = agreed(&all, &self.ranks_on_this_host());
        let at = Instant::now() + left_until(start, clock());
        // A sleep ends some tens of microseconds late.
        while Instant::now() < at {
            thread::yield_now();
        }
        Ok(RunStart { at, hold })
    }
}

/// When ranks start that are `here`, by their clock, and how long all are held. Each rank of a host finds the same.
fn agreed(arrivals: &[Arrival], here: &[usize]) -> (u64, Duration) {
    let last = here.iter().filter_map(|&rank| arrivals.get(rank)).map(|arrival| arrival.at).max();
    let longest = arrivals.iter().map(|arrival| arrival.wish).max();
    let start = last.unwrap_or_default().saturating_add(nanoseconds(MARGIN));
    (start, Duration::from_nanos(longest.unwrap_or_default()))
}

/// From `now` until the `start`: nothing where that has passed, and no more than it can be unless the clock was put back.
fn left_until(start: u64, now: u64) -> Duration {
    Duration::from_nanos(start.saturating_sub(now)).min(MARGIN)
}

fn clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanoseconds)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROS: u64 = 1000;

    fn arrivals(micros: &[(u64, u64)]) -> Vec<Arrival> {
        micros.iter().map(|&(at, wish)| Arrival { at: at * MICROS, wish: wish * MICROS }).collect()
    }

    #[test]
    fn ranks_of_a_host_start_after_its_last_one_and_all_are_held_equally_long() {
        // Ranks 2 and 3 are on a host whose clock is another.
        let all = arrivals(&[(100, 300), (170, 80), (9_000_000, 90), (8_000_000, 450)]);
        let hold = Duration::from_micros(450);
        assert_eq!(agreed(&all, &[0, 1]), (1_170 * MICROS, hold));
        assert_eq!(agreed(&all, &[2, 3]), (9_001_000 * MICROS, hold));
        assert_eq!(agreed(&all, &[1]), (1_170 * MICROS, hold));
        let alone = arrivals(&[(5, 0)]);
        assert_eq!(agreed(&alone, &[0]), (1_005 * MICROS, Duration::ZERO));
    }

    #[test]
    fn nobody_waits_longer_than_the_margin() {
        let start = 5_000 * MICROS;
        assert_eq!(left_until(start, 4_300 * MICROS), Duration::from_micros(700));
        assert_eq!(left_until(start, start), Duration::ZERO);
        assert_eq!(left_until(start, start + 1), Duration::ZERO);
        // A clock that was put back, and one that says nothing.
        assert_eq!(left_until(start, 0), MARGIN);
        assert_eq!(agreed(&arrivals(&[(u64::MAX / MICROS, 1)]), &[0]).0, u64::MAX);
    }

    #[test]
    fn what_is_sent_is_what_is_received() {
        let arrival = Arrival { at: 1 << 60, wish: 5_000_000 };
        assert_eq!(Arrival::from_bytes(&arrival.to_bytes()), Some(arrival));
        for length in [0, 7, 8, 15, 17] {
            assert_eq!(Arrival::from_bytes(&vec![0; length]), None);
        }
    }
}
