//! The files that this process reads, and those that it will write: none may be both, and no two outputs may be one file.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use counterpoint_files::{Destination, FileId, OpenFile, Owners, ReadError, ReadLimits, TrustedFolder};

use crate::console;
use crate::error::CliError;

/// How long a pipe may take to give all that it has.
pub(crate) const PIPE: Duration = Duration::from_secs(120);

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
    enter(what, path, file.id())?;
    Ok(file)
}

/// Takes note of a file that is read, which no output may replace.
fn enter(what: &'static str, path: &Path, id: FileId) -> Result<(), CliError> {
    let mut used = used();
    if let Some(output) = used.written.iter().find(|output| output.destination.id() == Some(id)) {
        return Err(replaced(output, what, path));
    }
    used.read.push(Input { what, path: path.to_owned(), id });
    Ok(())
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

/// The text of a file that nobody named, which is looked for where such files are kept; `None` where there is none. Its folder and it must
/// be this user's or root's, and nobody else may write to them: what it says decides about plans.
pub fn read_kept(what: &'static str, path: &Path, most_bytes: u64) -> Result<Option<String>, CliError> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
    let read =
        TrustedFolder::open(folder, Owners::default()).and_then(|folder| folder.read(name, most_bytes));
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(source) => {
            let is_there = fs::symlink_metadata(path).map_or_else(
                |error| !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
                |_| true,
            );
            let path = path.to_owned();
            return if is_there { Err(CliError::Distrusted { what, path, source }) } else { Ok(None) };
        }
    };
    FileId::at(path).map_or(Ok(()), |id| enter(what, path, id))?;
    let no_text = |_| CliError::Unreadable { what, path: path.to_owned(), source: ReadError::NotText };
    String::from_utf8(bytes).map(Some).map_err(no_text)
}

/// Makes the folder of such files where it is not there, for this user alone.
pub fn make_kept_folder(what: &'static str, folder: &Path) -> Result<(), CliError> {
    let made = TrustedFolder::open_or_make(folder, Owners::default());
    made.map(|_| ()).map_err(|source| CliError::Distrusted { what, path: folder.to_owned(), source })
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    /// What nobody named is this user's, or it is not read. Only root can give files away.
    #[test]
    fn what_another_user_kept_is_refused_in_a_sentence() {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("kept");
        let path = folder.join("profile.json");
        let read = || read_kept("machine profile", &path, 100).map_err(|error| error.to_string());
        assert_eq!(read(), Ok(None));
        make_kept_folder("folder of machine profiles", &folder).unwrap();
        assert_eq!((read(), folder.metadata().unwrap().permissions().mode() & 0o777), (Ok(None), 0o700));
        fs::write(&path, "text").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(), Ok(Some("text".to_owned())));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        let refused = read().unwrap_err();
        assert!(refused.contains("profile.json is not used: others may write to it"), "{refused}");
        if chown(&path, Some(12345), None).is_ok() {
            let refused = read().unwrap_err();
            assert!(refused.contains("it belongs to user 12345"), "{refused}");
            // An empty folder of someone else's keeps nothing from anybody.
            fs::remove_file(&path).unwrap();
            chown(&folder, Some(12345), None).unwrap();
            assert_eq!(read(), Ok(None));
            assert!(make_kept_folder("folder of machine profiles", &folder).is_err());
        }
    }
}
