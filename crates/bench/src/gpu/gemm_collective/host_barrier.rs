//! A barrier of the ranks' threads with a limit, which a rank that fails opens for all.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use counterpoint_exec::{DeviceFault, ExecError};

/// Where the ranks' threads wait for each other, but not longer than the limit and not for one that has failed.
pub(super) struct HostBarrier {
    ranks: usize,
    limit: Duration,
    state: Mutex<BarrierState>,
    changed: Condvar,
}

#[derive(Default)]
struct BarrierState {
    round: u64,
    here: usize,
    failed: Option<ExecError>,
}

impl HostBarrier {
    pub(super) fn new(ranks: usize, limit: Duration) -> Self {
        Self { ranks, limit, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Nobody waits any more.
    pub(super) fn give_up(&self, error: ExecError) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Of the first that gave up.
    pub(super) fn first_error(self) -> Option<ExecError> {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner).failed
    }

    pub(super) fn wait(&self, rank: usize) -> Result<(), ExecError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let round = state.round;
        state.here += 1;
        if state.here == self.ranks {
            (state.here, state.round) = (0, round + 1);
            self.changed.notify_all();
            return Ok(());
        }
        let waiting = |state: &mut BarrierState| state.round == round && state.failed.is_none();
        let waited = self.changed.wait_timeout_while(state, self.limit, waiting);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.round != round {
            return Ok(());
        }
        let evidence = match timeout.timed_out() {
            true => format!("another rank did not come in {:.3} s", self.limit.as_secs_f64()),
            false => "another rank has failed".to_owned(),
        };
        let reason = DeviceFault::Wait { evidence };
        Err(ExecError::Device { rank, place: "a benchmark".to_owned(), reason })
    }
}
