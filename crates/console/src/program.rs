//! How this program was started: with which arguments, and by what it is started again.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, io};

struct Started {
    by: PathBuf,
    arguments: Vec<OsString>,
}

static STARTED: OnceLock<Started> = OnceLock::new();

/// Says that this process, whose executable is another program, was started as this one: by an executable file, such as a script of
/// Python's, with these arguments. Once, before anything asks.
pub fn started_by(file: PathBuf, arguments: Vec<OsString>) {
    // A second time says the same.
    let _ = STARTED.set(Started { by: file, arguments });
}

/// The arguments, without the program's name.
pub fn arguments() -> Vec<OsString> {
    STARTED.get().map_or_else(|| env::args_os().skip(1).collect(), |started| started.arguments.clone())
}

/// The executable file that starts this program.
///
/// # Errors
/// When the system does not say.
pub fn file() -> io::Result<PathBuf> {
    STARTED.get().map_or_else(env::current_exe, |started| Ok(started.by.clone()))
}
