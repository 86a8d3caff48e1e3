//! Values that threads wait for with a limit, all of which a failure anywhere wakes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Locks a mutex whose data stays valid when a holder panics: every critical section here only assigns.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value that threads wait on. Made by [`World::monitor`](crate::World), so that a failure anywhere wakes every waiter.
#[derive(Debug)]
pub(crate) struct Monitor<T> {
    state: Mutex<T>,
    changed: Condvar,
    /// Threads that sleep. They are counted under the lock, so `update` sees them all. Where there are none it saves a call of the system.
    asleep: AtomicUsize,
}

impl<T> Monitor<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new(), asleep: AtomicUsize::new(0) }
    }

    /// Changes the value and wakes all waiters.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let (result, asleep) = {
            let mut state = lock(&self.state);
            (change(&mut state), self.asleep.load(Ordering::Relaxed))
        };
        if asleep > 0 {
            self.changed.notify_all();
        }
        result
    }

    /// Looks at the value.
    pub(crate) fn peek<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&lock(&self.state))
    }

    /// Sleeps until `ready` gives something; `None` once `give_up` says so (asked whenever the value changed or someone
    /// called [`Wake::wake`]) or at the deadline.
    pub(crate) fn wait_until<R>(
        &self,
        deadline: Instant,
        mut give_up: impl FnMut() -> bool,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut state = lock(&self.state);
        loop {
            if give_up() {
                return None;
            }
            if let Some(result) = ready(&mut state) {
                return Some(result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            self.asleep.fetch_add(1, Ordering::Relaxed);
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            self.asleep.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What a failure wakes.
pub(crate) trait Wake: Send + Sync {
    /// Lets every waiter ask again whether to give up.
    fn wake(&self);
}

impl<T: Send> Wake for Monitor<T> {
    fn wake(&self) {
        // Holding the lock once means that no waiter is between its question and its sleep.
        drop(lock(&self.state));
        self.changed.notify_all();
    }
}
