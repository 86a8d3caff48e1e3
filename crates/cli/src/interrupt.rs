//! Ctrl-C and termination: the process ends at once with status 130, all ranks with it, as they are its threads. The only
//! thing that must not be cut short is the writing of output files, or a temporary file would stay behind.

use std::sync::{Mutex, PoisonError};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

static WRITING: Mutex<()> = Mutex::new(());

/// Exit status of a process that was interrupted: 128 and the number of SIGINT.
const INTERRUPTED: i32 = 130;

/// Has a thread wait for signals. Where the system refuses one, its own handling stays in place, which ends the process too.
pub(crate) fn install() {
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else { return };
    let wait = move || {
        if signals.forever().next().is_some() {
            let _not_while_writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
            // Without the handlers of a normal end: libraries would tear down what other threads are still using.
            signal_hook::low_level::exit(INTERRUPTED);
        }
    };
    // Without a thread nothing would hear them, but then no rank could be started either.
    let _ = thread::Builder::new().name("signals".to_owned()).spawn(wait);
}

/// Runs `write`; an interruption takes effect after it.
pub(crate) fn not_during<T>(write: impl FnOnce() -> T) -> T {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    write()
}
