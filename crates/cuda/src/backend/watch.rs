//! The end of a run: waits that have a limit, and what waits on the device have recorded.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::{Awaited, Blocker, DeviceFault, ExecError};

use super::counter_waits::CounterWaits;
use super::exchange_marks::ExchangeMarks;
use super::rank::Rank;
use super::{CudaBackend, CudaStream};
use crate::kernel::{CtaWaits, LinkEnd, LinkStep, MissedRank, MissedWait};
use crate::sync::lock;

/// How long the end of a run is awaited by asking again and again.
pub(super) const CLOSE_WATCH: Duration = Duration::from_millis(2);
/// Between questions after that.
pub(super) const PAUSE: Duration = Duration::from_micros(50);

impl CudaBackend {
    /// Waits until `stream` is idle, for `limit` at most.
    pub(super) fn wait_until_idle(&self, stream: &CudaStream, began: Instant) -> Result<(), ExecError> {
        let Rank { world, rank, .. } = &*self.0;
        // Longer than any wait on the host while operations are enqueued: those know better what they waited for.
        let limit = world.config().limit.saturating_add(world.config().limit / 16);
        loop {
            let place = format!("the end of a run on stream {}", stream.status().name);
            if stream.queue().is_idle().map_err(|error| self.error(&place, error))? {
                return world.check();
            }
            world.check()?;
            let waited = began.elapsed();
            if waited > limit {
                let stall = match self.exchange_under_way() {
                    Some(exchange) => exchange.stalled(self, began),
                    None => {
                        let awaited = Awaited {
                            name: format!("stream {} of {}", stream.status().name, self.0.device),
                            evidence: "the device has not finished what was enqueued there".to_owned(),
                            blocker: None::<Blocker>,
                        };
                        world.stalled(*rank, place, began, awaited)
                    }
                };
                return Err(world.fail(stall));
            }
            // Short runs are watched closely, long ones leave the core to others.
            if waited < CLOSE_WATCH { std::hint::spin_loop() } else { thread::sleep(PAUSE) }
        }
    }

    /// Waits until `stream` is idle, also where the world has failed, for `limit` at most. Whether it is: a device that has failed runs
    /// nothing any more.
    pub(super) fn becomes_idle(&self, stream: &CudaStream, began: Instant) -> bool {
        while matches!(stream.queue().is_idle(), Ok(false)) {
            if began.elapsed() > self.0.world.config().limit {
                return false;
            }
            thread::sleep(PAUSE);
        }
        true
    }

    /// Has the end of every run ask whether a wait inside a kernel gave up.
    pub(crate) fn watch(&self, label: String, waits: CtaWaits) {
        let counts = |(_, waits): &(String, CtaWaits)| waits.is_used() || waits.found().is_some();
        add_watched(&self.0.waits, (label, waits), counts);
    }

    /// Has the end of every run ask whether a rank was waited for in vain.
    pub(crate) fn watch_link(&self, label: String, link: Arc<LinkEnd>) {
        let counts =
            |(_, link): &(String, Arc<LinkEnd>)| Arc::strong_count(link) > 1 || link.missed().is_some();
        add_watched(&self.0.links, (label, link), counts);
    }

    /// Has a wait that reaches its limit ask whether this exchange is what it waits for.
    pub(crate) fn watch_exchange(&self, exchange: Arc<ExchangeMarks>) {
        add_watched(&self.0.exchanges, exchange, |exchange| Arc::strong_count(exchange) > 1);
    }

    /// Whether a wait inside a kernel of this rank's world has given up so far, and who waited for whom: without waiting for anything,
    /// while kernels run. As long as none has, it reads one word.
    ///
    /// # Errors
    /// The world's error, when it has failed; otherwise what the wait has left, which fails the world.
    pub fn poll(&self) -> Result<(), ExecError> {
        self.0.world.check()?;
        if !self.0.device.waits_have_ended() {
            return Ok(());
        }
        // A kernel gives up when the limit is over.
        let now = Instant::now();
        let began = now.checked_sub(self.0.world.config().limit).unwrap_or(now);
        let found = self.check_links(began).and_then(|()| self.check_waits());
        found.and_then(|()| self.check_counters(began)).map_err(|error| self.0.world.fail(error))
    }

    /// Whether all ranks that kernels waited for have come.
    pub(super) fn check_links(&self, began: Instant) -> Result<(), ExecError> {
        let Rank { world, rank, links, exchanges, .. } = &*self.0;
        for (label, link) in lock(links).iter() {
            let Some(MissedRank { rank: awaited, step, seen, wanted }) = link.missed() else { continue };
            let of_call =
                |what: &str| format!("rank {awaited} has {what} call {seen} of it, and not call {wanted}");
            let evidence = match step {
                LinkStep::Begin => of_call("begun"),
                LinkStep::Pass => of_call("read or written this rank's rows in"),
                LinkStep::Send => of_call("sent all of its rows in"),
                LinkStep::Deliver => {
                    format!("rank {awaited} has delivered {seen} parts of its rows, and not part {wanted}")
                }
            };
            let awaited =
                Awaited { name: format!("rank {awaited}"), evidence, blocker: Some(Blocker::Rank(awaited)) };
            return Err(world.stalled(*rank, label.clone(), began, awaited));
        }
        // Those that nobody else holds belong to calls that were made once.
        lock(links).retain(|(_, link)| Arc::strong_count(link) > 1);
        lock(exchanges).retain(|exchange| Arc::strong_count(exchange) > 1);
        Ok(())
    }

    /// Has the end of every run ask whether a kernel was waited for in vain.
    pub(super) fn watch_counters(&self, waits: CounterWaits) {
        add_watched(&self.0.counters, waits, |waits| waits.is_used() || waits.missed().is_some());
    }

    /// Whether all kernels that streams wait for have raised their counters.
    pub(super) fn check_counters(&self, began: Instant) -> Result<(), ExecError> {
        let Rank { world, rank, counters, .. } = &*self.0;
        lock(counters).retain(CounterWaits::is_used);
        for waits in lock(counters).iter() {
            let Some((label, MissedWait { seen, wanted, .. })) = waits.missed() else { continue };
            // Behind an exchange that another rank does not take part in nothing starts.
            if let Some(exchange) = self.exchange_under_way() {
                return Err(exchange.stalled(self, began));
            }
            let awaited = Awaited {
                name: format!("a kernel of {} that raises its counter", self.0.device),
                evidence: format!("it is at {seen} of {wanted}"),
                blocker: None::<Blocker>,
            };
            return Err(world.stalled(*rank, label, began, awaited));
        }
        Ok(())
    }

    /// Whether every wait inside a kernel came to its end.
    pub(super) fn check_waits(&self) -> Result<(), ExecError> {
        let Rank { rank, waits, .. } = &*self.0;
        for (label, waits) in lock(waits).iter() {
            if let Some(evidence) = waits.found() {
                let reason = DeviceFault::Wait { evidence };
                return Err(ExecError::Device { rank: *rank, place: format!("`{label}`"), reason });
            }
        }
        lock(waits).retain(|(_, waits)| waits.is_used());
        Ok(())
    }
}

/// Adds to a list from which the end of a run takes what nobody uses. Who only polls comes to no such end, so that what does not count
/// any more also goes before the list would need more memory.
pub(super) fn add_watched<T>(list: &Mutex<Vec<T>>, added: T, counts: impl Fn(&T) -> bool) {
    let mut list = lock(list);
    if list.len() == list.capacity() {
        list.retain(counts);
    }
    list.push(added);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_nobody_reads_does_not_grow() {
        let list = Mutex::new(Vec::new());
        let kept: Vec<Arc<usize>> = (0..5).map(Arc::new).collect();
        kept.iter().for_each(|one| add_watched(&list, one.clone(), |one| Arc::strong_count(one) > 1));
        for number in 0..10_000 {
            add_watched(&list, Arc::new(number), |one| Arc::strong_count(one) > 1);
        }
        let list = lock(&list);
        assert!(list.capacity() <= 32, "{}", list.capacity());
        assert!(kept.iter().all(|one| list.iter().any(|other| Arc::ptr_eq(one, other))));
    }
}
