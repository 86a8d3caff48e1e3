//! Threads inside NCCL that nobody waits for any more.

use std::ffi::c_int;
use std::io::{self, Write};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many there are.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// A thread that is inside, until this goes.
pub(super) struct Inside(());

impl Inside {
    pub(super) fn enter() -> Self {
        THREADS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::SeqCst);
    }
}

unsafe extern "C" {
    /// POSIX.
    fn _exit(status: c_int) -> !;
}

/// Ends this process as [`process::exit`] does. Where a thread that was given up is still inside NCCL, which crashes when the process
/// ends under it, no library's own end is run.
pub fn end_process(status: u8) -> ! {
    if THREADS.load(Ordering::SeqCst) == 0 {
        process::exit(status.into());
    }
    // Nobody could be told.
    io::stdout().flush().ok();
    // SAFETY: it takes a number and does not return.
    unsafe { _exit(status.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_while_they_are_inside() {
        let before = THREADS.load(Ordering::SeqCst);
        let inside = [Inside::enter(), Inside::enter()];
        assert_eq!(THREADS.load(Ordering::SeqCst), before + 2);
        drop(inside);
        assert_eq!(THREADS.load(Ordering::SeqCst), before);
    }
}
