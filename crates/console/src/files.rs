//! The files that this process reads, and those that it will write: none may be both, and no two outputs may be one file.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use counterpoint_files::{Destination, FileId, OpenFile, ReadLimits};

use crate::console;
use crate::error::CliError;

/// How long a pipe may take to give all that it has.
const PIPE: Duration = Duration::from_secs(120);

static USED: Mutex<Used> = Mutex::new(Used { next: 0, read: Vec::new(), written: Vec::new() });

/// The one record of what this process reads and writes. Every file is entered where it is opened, so no command keeps a list.
struct Used {
    next: u64,
    read: Vec<Input>,
    written: Vec<Output>,
}

struct Input {
    what: &'static str,
    path: PathBuf,
    id: FileId,
}

struct Output {
    number: u64,
    flag: &'static str,
    path: PathBuf,
    destination: Destination,
}

fn used() -> MutexGuard<'static, Used> {
    USED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a file that the user named, or that is kept for this user. `what` it is to be, such as `mask file`, is for messages.
pub fn open(what: &'static str, path: &Path) -> Result<OpenFile, CliError> {
    let unreadable = |source| CliError::Unreadable { what, path: path.to_owned(), source };
    let file = OpenFile::open(path).map_err(unreadable)?;
    let mut used = used();
    let output = used.written.iter().find(|output| output.destination.id() == Some(file.id()));
    if let Some(output) = output {
        return Err(replaced(output, what, path));
    }
    used.read.push(Input { what, path: path.to_owned(), id: file.id() });
    Ok(file)
}

/// The text of such a file, which may be a pipe: `most_bytes` at most, and within two minutes.
pub fn read_text(what: &'static str, path: &Path, most_bytes: u64) -> Result<String, CliError> {
    let mut file = open(what, path)?;
    if file.is_pipe() {
        console::note_waiting(path, "writes to it");
    }
    let unreadable = |source| CliError::Unreadable { what, path: path.to_owned(), source };
    file.text(ReadLimits { most_bytes, pipe: PIPE }).map_err(unreadable)
}

/// As [`read_text`]; `None` where there is no such file.
pub fn read_text_if_there(
    what: &'static str,
    path: &Path,
    most_bytes: u64,
) -> Result<Option<String>, CliError> {
    match read_text(what, path, most_bytes) {
        Ok(text) => Ok(Some(text)),
        Err(CliError::Unreadable { source, .. }) if source.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The right to write a file, which no other output of this process has and no input is. It goes when this is dropped.
#[derive(Debug)]
pub struct Claim(u64);

impl Claim {
    /// Takes it for what a flag names, before anything is computed.
    pub fn of(flag: &'static str, path: &Path, destination: &Destination) -> Result<Self, CliError> {
        let mut used = used();
        if let Some(first) = used.written.iter().find(|output| output.destination.is_same(destination)) {
            return Err(CliError::SameFile { first: first.flag, second: flag, path: path.to_owned() });
        }
        used.next += 1;
        let number = used.next;
        let output = Output { number, flag, path: path.to_owned(), destination: destination.clone() };
        if let Some(input) = used.read.iter().find(|input| destination.id() == Some(input.id)) {
            return Err(replaced(&output, input.what, &input.path));
        }
        used.written.push(output);
        Ok(Self(number))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        used().written.retain(|output| output.number != self.0);
    }
}

fn replaced(output: &Output, what: &'static str, input: &Path) -> CliError {
    let Output { flag, path, .. } = output;
    CliError::InputReplaced { flag, path: path.clone(), what, input: input.to_owned() }
}
