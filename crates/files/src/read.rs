//! Reading what a user names: a regular file or a pipe, up to a size, within a time.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use thiserror::Error;

use crate::FileId;

/// How much is read at most, and how long a pipe may take to give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Bytes.
    pub most_bytes: u64,
    /// From the beginning of reading to the end of the pipe. Regular files have no limit: the system gives what they hold.
    pub pipe: Duration,
}

/// Why a file cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The system refuses.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is a folder.
    #[error("it is a folder; give a file")]
    Folder,
    /// It is a device or a socket, which may have no end.
    #[error("it is a device, which may have no end; give a file or a pipe")]
    Device,
    /// It is a pipe where parts of a file must be read in any order.
    #[error("it is not a regular file; write what the pipe gives to a file first")]
    Pipe,
    /// It holds more than may be read.
    #[error("it is longer than {most_bytes} bytes")]
    TooLong {
        /// The limit.
        most_bytes: u64,
    },
    /// A pipe did not come to its end in time.
    #[error("it is a pipe whose end did not come within {} s, after {bytes} bytes; close it where it is written", limit.as_secs_f64())]
    Unfinished {
        /// The limit.
        limit: Duration,
        /// What came until then.
        bytes: usize,
    },
    /// It is not text.
    #[error("it is not UTF-8 text; save it as UTF-8")]
    NotText,
}

impl ReadError {
    /// Whether there is no such file.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == ErrorKind::NotFound)
    }
}

/// A regular file or a pipe that is open for reading. Opening one never waits.
#[derive(Debug)]
pub struct OpenFile {
    file: File,
    id: FileId,
    is_pipe: bool,
}

impl OpenFile {
    /// Opens it; what it is is asked of what is open, so nothing can take its place in between.
    ///
    /// # Errors
    /// No such file, no permission, or neither a regular file nor a pipe.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        // Without O_NONBLOCK, opening a pipe waits until something opens its other end.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let metadata = file.metadata()?;
        let kind = metadata.file_type();
        match (kind.is_file() || kind.is_fifo(), kind.is_dir()) {
            (true, _) => Ok(Self { file, id: FileId::of(&metadata), is_pipe: kind.is_fifo() }),
            (false, true) => Err(ReadError::Folder),
            (false, false) => Err(ReadError::Device),
        }
    }

    /// Which file it is.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Whether it is a pipe, which may have to be waited for.
    pub fn is_pipe(&self) -> bool {
        self.is_pipe
    }

    /// The file itself, to read parts of it in any order.
    ///
    /// # Errors
    /// [`ReadError::Pipe`].
    pub fn regular(self) -> Result<File, ReadError> {
        if self.is_pipe { Err(ReadError::Pipe) } else { Ok(self.file) }
    }

    /// All of it.
    ///
    /// # Errors
    /// The system refuses, or it keeps to none of the limits.
    pub fn bytes(&mut self, limits: ReadLimits) -> Result<Vec<u8>, ReadError> {
        let ReadLimits { most_bytes, .. } = limits;
        let mut bytes = Vec::new();
        if self.is_pipe {
            self.drain(limits, &mut bytes)?;
        } else if self.file.metadata()?.len() > most_bytes {
            return Err(ReadError::TooLong { most_bytes });
        } else {
            // Its length is asked before, and may have grown since; what /proc holds has none.
            (&self.file).take(most_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
        }
        if bytes.len() as u64 > most_bytes { Err(ReadError::TooLong { most_bytes }) } else { Ok(bytes) }
    }

    /// All of it, as text.
    ///
    /// # Errors
    /// As [`OpenFile::bytes`], and what is no UTF-8.
    pub fn text(&mut self, limits: ReadLimits) -> Result<String, ReadError> {
        String::from_utf8(self.bytes(limits)?).map_err(|_| ReadError::NotText)
    }

    /// Reads a pipe to its end, or a byte beyond what may be read.
    fn drain(&mut self, limits: ReadLimits, bytes: &mut Vec<u8>) -> Result<(), ReadError> {
        let deadline = Instant::now() + limits.pipe;
        let mut block = vec![0; 1 << 16];
        while bytes.len() as u64 <= limits.most_bytes {
            // An end before anything has opened the other side is no end: only poll distinguishes the two.
            if !self.is_ready(deadline)? {
                return Err(ReadError::Unfinished { limit: limits.pipe, bytes: bytes.len() });
            }
            match self.file.read(&mut block) {
                Ok(0) => return Ok(()),
                Ok(count) => bytes.extend_from_slice(&block[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until a read would give something, or the end.
    fn is_ready(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&limit)) {
                Ok(ready) => return Ok(ready > 0),
                // A signal that another thread acts on.
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::process::Command;
    use std::thread;

    use super::*;

    const LIMITS: ReadLimits = ReadLimits { most_bytes: 1 << 20, pipe: Duration::from_millis(200) };

    fn pipe() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        (folder, path)
    }

    #[test]
    fn files_are_read_up_to_their_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for length in [0, 1, 1 << 20] {
            fs::write(&path, vec![b'x'; length]).unwrap();
            assert_eq!(OpenFile::open(&path).unwrap().text(LIMITS).unwrap().len(), length);
        }
        fs::write(&path, vec![b'x'; (1 << 20) + 1]).unwrap();
        assert!(matches!(OpenFile::open(&path).unwrap().text(LIMITS), Err(ReadError::TooLong { .. })));
        fs::write(&path, b"\xff").unwrap();
        assert!(matches!(OpenFile::open(&path).unwrap().text(LIMITS), Err(ReadError::NotText)));
        assert!(OpenFile::open(&folder.path().join("none")).unwrap_err().is_not_found());
        assert!(matches!(OpenFile::open(folder.path()), Err(ReadError::Folder)));
        for device in ["/dev/zero", "/dev/null", "/dev/tty"] {
            // There may be no terminal.
            let refused = OpenFile::open(Path::new(device)).unwrap_err();
            assert!(matches!(refused, ReadError::Device | ReadError::Io(_)), "{device}: {refused}");
        }
    }

    #[test]
    fn a_pipe_is_read_to_its_end_in_time_or_refused() {
        let (_folder, path) = pipe();
        let began = Instant::now();
        let mut silent = OpenFile::open(&path).unwrap();
        assert!(silent.is_pipe());
        assert!(matches!(silent.bytes(LIMITS), Err(ReadError::Unfinished { bytes: 0, .. })));
        assert!(matches!(OpenFile::open(&path).unwrap().regular(), Err(ReadError::Pipe)));
        drop(silent);

        // Who opens it late, says something, and closes it.
        let patient = ReadLimits { pipe: Duration::from_secs(60), ..LIMITS };
        let mut waiting = OpenFile::open(&path).unwrap();
        let writer = |text: Vec<u8>, keep: Duration| {
            let path = path.clone();
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                let mut file = OpenOptions::new().write(true).open(path).unwrap();
                // A reader that has had enough is no failure of this one.
                let _ = file.write_all(&text);
                thread::sleep(keep);
            })
        };
        let one = writer(vec![b'x'; 300_000], Duration::ZERO);
        assert_eq!(waiting.text(patient).unwrap().len(), 300_000);
        one.join().unwrap();
        drop(waiting);

        // One that never ends, and one that keeps it open.
        let mut endless = OpenFile::open(&path).unwrap();
        let one = writer(vec![b'x'; 3 << 20], Duration::ZERO);
        assert!(matches!(endless.bytes(patient), Err(ReadError::TooLong { .. })));
        drop(endless);
        one.join().unwrap();
        let mut kept = OpenFile::open(&path).unwrap();
        let one = writer(b"four".to_vec(), Duration::from_millis(400));
        assert!(matches!(kept.bytes(LIMITS), Err(ReadError::Unfinished { bytes: 4, .. })));
        one.join().unwrap();
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn links_of_a_file_are_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let [file, hard, soft, other] =
            ["file", "hard", "soft", "other"].map(|name| folder.path().join(name));
        fs::write(&file, b"x").unwrap();
        fs::hard_link(&file, &hard).unwrap();
        std::os::unix::fs::symlink(&hard, &soft).unwrap();
        fs::write(&other, b"x").unwrap();
        let id = OpenFile::open(&file).unwrap().id();
        assert_eq!([Some(id); 2], [FileId::at(&hard), FileId::at(&soft)]);
        assert_ne!(Some(id), FileId::at(&other));
    }
}
