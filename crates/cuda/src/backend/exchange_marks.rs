//! How far calls have come whose waits have no limit on the device, of NCCL or for events of other processes, so that the host never runs
//! so far ahead of the device that it could not give up.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use counterpoint_exec::{Awaited, Blocker, ExecError};

use super::CudaBackend;
use super::watch::{CLOSE_WATCH, PAUSE};
use crate::sync::lock;
use crate::{CudaError, Device, Event};

/// Calls of one exchange that the host may be ahead of the device. It must not come so far ahead that the device's queue is
/// full: then the driver holds the host up, which could name to nobody for whom it waits.
const AHEAD: usize = 8;
/// Calls of all exchanges of a rank together: a queue takes about a thousand entries, and a call of NCCL's is six at most. Else the driver would
/// hold the host up inside a call of NCCL's, which nobody could abort meanwhile.
const AHEAD_TOGETHER: usize = 16;

/// Where the last calls of an exchange by means that have no limit on the device have begun and ended.
pub(crate) struct ExchangeMarks {
    label: String,
    /// The ranks that it needs.
    peers: Vec<usize>,
    calls: Mutex<Calls>,
}

struct Calls {
    marks: Vec<CallMarks>,
    next: usize,
}

/// The last calls of a rank's exchanges, of whichever, with the event that ends each.
#[derive(Default)]
pub(super) struct LastCalls(VecDeque<(Arc<ExchangeMarks>, Event)>);

/// Of one call.
#[derive(Clone)]
pub(crate) struct CallMarks {
    /// Passed when it has begun.
    pub(crate) begun: Event,
    /// Passed when it has ended.
    pub(crate) ended: Event,
}

impl ExchangeMarks {
    /// Of the exchange of this name with these ranks.
    pub(crate) fn new(device: &Device, label: String, peers: Vec<usize>) -> Result<Self, CudaError> {
        let marks = || Ok(CallMarks { begun: Event::new(device)?, ended: Event::new(device)? });
        let marks = (0..AHEAD).map(|_| marks()).collect::<Result<_, CudaError>>()?;
        Ok(Self { label, peers, calls: Mutex::new(Calls { marks, next: 0 }) })
    }

    /// Of the next call; those of an earlier one, which may not have ended yet.
    fn next(&self) -> CallMarks {
        let mut calls = lock(&self.calls);
        let at = calls.next;
        calls.next = (at + 1) % AHEAD;
        calls.marks[at].clone()
    }

    /// Whether a call has begun and not ended.
    fn is_under_way(&self) -> bool {
        let under_way =
            |call: &CallMarks| matches!((call.begun.is_done(), call.ended.is_done()), (Ok(true), Ok(false)));
        lock(&self.calls).marks.iter().any(under_way)
    }

    /// The error of a rank that has waited for this since `began`.
    pub(super) fn stalled(&self, backend: &CudaBackend, began: Instant) -> ExecError {
        let (world, rank) = (backend.world(), backend.0.rank);
        let suspect = world.suspect(&self.peers).unwrap_or(rank);
        let peers: Vec<String> = self.peers.iter().map(ToString::to_string).collect();
        let awaited = Awaited {
            name: format!("rank {suspect}"),
            evidence: format!("its exchange with rank {} has begun and not ended", peers.join(", ")),
            blocker: Some(Blocker::Rank(suspect)),
        };
        world.stalled(rank, self.label.clone(), began, awaited)
    }
}

impl CudaBackend {
    /// The marks of the next call of `exchange`, once the host is not too far ahead of the device.
    ///
    /// # Errors
    /// The world's; when an earlier call does not end within the limit.
    pub(crate) fn marks_of_next(&self, exchange: &Arc<ExchangeMarks>) -> Result<CallMarks, ExecError> {
        let marks = exchange.next();
        self.await_exchange(exchange, &marks.ended)?;
        let oldest = {
            let LastCalls(last) = &mut *lock(&self.0.last_calls);
            last.push_back((exchange.clone(), marks.ended.clone()));
            if last.len() > AHEAD_TOGETHER { last.pop_front() } else { None }
        };
        if let Some((exchange, ended)) = oldest {
            self.await_exchange(&exchange, &ended)?;
        }
        Ok(marks)
    }

    /// Waits on the host until a call of `exchange` has `ended`.
    fn await_exchange(&self, exchange: &ExchangeMarks, ended: &Event) -> Result<(), ExecError> {
        let (world, began) = (self.world(), Instant::now());
        while !ended.is_done().map_err(|error| self.error(&exchange.label, error))? {
            world.check()?;
            let waited = began.elapsed();
            if waited > world.config().limit {
                return Err(world.fail(exchange.stalled(self, began)));
            }
            if waited < CLOSE_WATCH { std::hint::spin_loop() } else { std::thread::sleep(PAUSE) }
        }
        Ok(())
    }

    /// The exchange that has begun on the device and not ended, if there is one.
    pub(super) fn exchange_under_way(&self) -> Option<Arc<ExchangeMarks>> {
        lock(&self.0.exchanges).iter().find(|marks| marks.is_under_way()).cloned()
    }
}
