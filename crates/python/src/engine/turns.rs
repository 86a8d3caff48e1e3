//! One call of a group at a time, and which thread is inside of it.

use std::sync::{Mutex, MutexGuard};
use std::thread::{self, ThreadId};

use super::lock;

/// Calls of a group follow each other: ranks that wait for each other must be called in one order.
#[derive(Default)]
pub(super) struct Turns {
    call: Mutex<()>,
    caller: Mutex<Option<ThreadId>>,
}

/// A call, until this goes.
pub(super) struct Turn<'a> {
    caller: &'a Mutex<Option<ThreadId>>,
    _call: MutexGuard<'a, ()>,
}

impl Turns {
    /// Waits for the call of another thread.
    pub(super) fn take(&self) -> Turn<'_> {
        let call = lock(&self.call);
        *lock(&self.caller) = Some(thread::current().id());
        Turn { caller: &self.caller, _call: call }
    }

    /// Whether this thread is inside of a call: its wait runs handlers of signals, which would wait for that call for ever.
    pub(super) fn are_taken_here(&self) -> bool {
        *lock(&self.caller) == Some(thread::current().id())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Before the next one can begin.
        *lock(self.caller) = None;
    }
}
