//! Ctrl-C and termination: the process ends at once with status 130, all ranks with it, as they are its threads. The only
//! thing that must not be cut short is the writing of output files, or a temporary file would stay behind.

use std::process;
use std::sync::{Mutex, PoisonError};

static WRITING: Mutex<()> = Mutex::new(());

/// Exit status of a process that was interrupted: 128 and the number of SIGINT.
const INTERRUPTED: i32 = 130;

/// Installs the handler. Where the system refuses one, its own stays in place, which ends the process too.
pub(crate) fn install() {
    let _ = ctrlc::set_handler(|| {
        let _not_while_writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        process::exit(INTERRUPTED);
    });
}

/// Runs `write`; an interruption takes effect after it.
pub(crate) fn not_during<T>(write: impl FnOnce() -> T) -> T {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    write()
}
