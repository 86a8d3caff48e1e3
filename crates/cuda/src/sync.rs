//! The one way in which this crate locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Every critical section only assigns, so that the data stays valid when a holder panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
