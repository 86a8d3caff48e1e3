//! A lock that processes hold while they change a file that all of them keep something in.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use thiserror::Error;

use crate::FileId;

/// Between two looks at whether a lock is free.
const LOOK: Duration = Duration::from_millis(5);

/// Why a lock cannot be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another process held it all the time.
    #[error("{} is held by {holder} for more than {} s; wait for it, or end it", path.display(), limit.as_secs_f64())]
    Held {
        /// The file of the lock.
        path: PathBuf,
        /// Who holds it, by the number that is written in the file.
        holder: String,
        /// How long this one waited.
        limit: Duration,
    },
    /// The file of the lock cannot be made or locked.
    #[error("{} cannot be locked: {source}", path.display())]
    Io {
        /// The file of the lock.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
}

/// The right to change a file, against all other processes that ask for it. It ends when this is dropped, or with the process.
///
/// It is a lock on a hidden file next to the one that is changed, since that is replaced. The holder removes the hidden file; whoever
/// has waited for one that is gone by then begins anew.
#[derive(Debug)]
pub struct FileLock {
    path: PathBuf,
    /// `None` where the file system knows no locks.
    _file: Option<File>,
}

impl FileLock {
    /// Waits for the lock of `target`, for `limit` at most. Where the file system has no locks there is nothing to wait for.
    ///
    /// # Errors
    /// Another process holds it for longer, or its file cannot be made.
    pub fn acquire(target: &Path, limit: Duration) -> Result<Self, LockError> {
        let path = path_of(target);
        let failed = |source| LockError::Io { path: path.clone(), source };
        let deadline = Instant::now() + limit;
        loop {
            let mut file = open(&path).map_err(failed)?;
            match file.try_lock() {
                Ok(()) if is_still_there(&path, &file) => {
                    // For others to name; without it they wait all the same.
                    let _ = file.set_len(0).and_then(|()| write!(file, "process {}", std::process::id()));
                    return Ok(Self { path, _file: Some(file) });
                }
                // Its holder has removed it, or the file system numbers a file otherwise each time that it is asked.
                Ok(()) | Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(LockError::Held { holder: holder(&mut file), path, limit });
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => thread::sleep(LOOK),
                Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {
                    return Ok(Self { path, _file: None });
                }
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Before the lock ends, so that nobody else's file is removed.
        let _ = fs::remove_file(&self.path);
    }
}

fn path_of(target: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(".lock");
    target.with_file_name(name)
}

fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    // What others have written in it stays: they may hold it.
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o666).custom_flags(flags).open(path)
}

fn is_still_there(path: &Path, file: &File) -> bool {
    let ours = file.metadata().ok().map(|metadata| FileId::of(&metadata));
    ours.is_some() && ours == FileId::at(path)
}

fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(40).read_to_string(&mut text);
    if read.is_ok() && !text.is_empty() { text } else { "another process".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("kept.json");
        let counter = folder.path().join("counter");
        fs::write(&counter, "0").unwrap();
        let add = || {
            for _ in 0..50 {
                let _lock = FileLock::acquire(&target, Duration::from_secs(60)).unwrap();
                let count: u32 = fs::read_to_string(&counter).unwrap().parse().unwrap();
                fs::write(&counter, (count + 1).to_string()).unwrap();
            }
        };
        thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(add))));
        assert_eq!(fs::read_to_string(&counter).unwrap(), "400");
        let names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["counter"]);
    }

    #[test]
    fn who_holds_it_is_named_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("kept.json");
        let held = FileLock::acquire(&target, Duration::ZERO).unwrap();
        let began = Instant::now();
        let error = FileLock::acquire(&target, Duration::from_millis(100)).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(10));
        let words = format!("process {} ", std::process::id());
        assert!(error.to_string().contains(&words), "{error}");
        drop(held);
        drop(FileLock::acquire(&target, Duration::ZERO).unwrap());
        let nowhere = folder.path().join("no/kept.json");
        assert!(matches!(FileLock::acquire(&nowhere, Duration::ZERO), Err(LockError::Io { .. })));
        // A link that someone else has laid there is not followed.
        std::os::unix::fs::symlink("elsewhere", folder.path().join(".kept.json.lock")).unwrap();
        assert!(matches!(FileLock::acquire(&target, Duration::ZERO), Err(LockError::Io { .. })));
        assert!(!folder.path().join("elsewhere").exists());
    }
}
