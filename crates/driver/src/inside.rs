//! Threads inside NCCL or the driver that nobody waits for any more.

use std::ffi::c_int;
use std::io::{self, Write};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// How long the end of a process waits for such threads where all went well.
const PATIENCE: Duration = Duration::from_secs(2);

/// How many there are.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Whether a device may have been left with work that never ends.
static LEFT_WAITING: AtomicBool = AtomicBool::new(false);

/// A device of this process may wait for an event of a process that is gone, and so would whoever waits for the device.
pub(crate) fn leave_waiting() {
    LEFT_WAITING.store(true, Ordering::SeqCst);
}

/// A thread that is inside NCCL or the driver, until this goes; [`end_process`] knows of it.
#[must_use = "the thread counts only as long as this lives"]
#[derive(Debug)]
pub struct Inside(());

impl Inside {
    /// The calling thread is inside from now on.
    pub fn enter() -> Self {
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

/// Ends this process as [`process::exit`] does. No library's own end is run where a thread that nobody waits for is still inside NCCL or
/// the driver, which crash when the process ends under them, or where a device may have been left with work that never ends, for which the
/// driver's end waits.
pub fn end_process(status: u8) -> ! {
    const LOOK: Duration = Duration::from_millis(2);
    // What went well lets other processes close what they have of this one's.
    let looks = if status == 0 { PATIENCE.as_millis() / LOOK.as_millis() } else { 0 };
    for _ in 0..looks {
        if THREADS.load(Ordering::SeqCst) == 0 {
            break;
        }
        thread::sleep(LOOK);
    }
    if THREADS.load(Ordering::SeqCst) == 0 && !LEFT_WAITING.load(Ordering::SeqCst) {
        process::exit(status.into());
    }
    // There is no one to return an error to.
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
