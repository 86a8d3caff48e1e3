//! Folders whose files are used as they are, without anyone looking at them: only where nobody else can have put them there.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, openat};
use thiserror::Error;

/// Whose files are trusted: the user's that this process runs as, those of root, and maybe those of one more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    /// The number of a user who is trusted besides, such as the one who keeps software that many use.
    pub also: Option<u32>,
}

/// Why a file or a folder is not used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DistrustError {
    /// The system refuses.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It belongs to someone else.
    #[error("it belongs to user {uid}, who is neither this one nor root")]
    Owner {
        /// Whose it is.
        uid: u32,
    },
    /// Others may change it.
    #[error("others may write to it (mode {mode:04o}); chmod go-w it, if nobody has")]
    Writable {
        /// Its permissions.
        mode: u32,
    },
    /// It is a link, a pipe, a device or a folder.
    #[error("it is not a regular file")]
    NotRegular,
    /// It holds more than may be read.
    #[error("it has {bytes} bytes, more than the {most_bytes} that are read")]
    TooLong {
        /// What it has.
        bytes: u64,
        /// The limit.
        most_bytes: u64,
    },
}

impl Owners {
    fn check(self, metadata: &Metadata) -> Result<(), DistrustError> {
        let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        if uid != 0 && uid != rustix::process::geteuid().as_raw() && Some(uid) != self.also {
            return Err(DistrustError::Owner { uid });
        }
        // An access list's entries cannot exceed the group's bits.
        if mode & 0o022 != 0 { Err(DistrustError::Writable { mode }) } else { Ok(()) }
    }
}

/// An open folder that belongs to a trusted owner and that nobody else may write to.
#[derive(Debug)]
pub struct TrustedFolder {
    path: PathBuf,
    folder: File,
    owners: Owners,
}

impl TrustedFolder {
    /// Opens it. Where the path leads there is the user's choice; what counts is the folder at its end.
    ///
    /// # Errors
    /// No such folder, or one that is not trusted.
    pub fn open(path: &Path, owners: Owners) -> Result<Self, DistrustError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?);
        owners.check(&folder.metadata()?)?;
        Ok(Self { path: path.to_owned(), folder, owners })
    }

    /// As [`TrustedFolder::open`]; made for this user alone where it is not there.
    ///
    /// # Errors
    /// It cannot be made, or is not trusted.
    pub fn open_or_make(path: &Path, owners: Owners) -> Result<Self, DistrustError> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Self::open(path, owners)
    }

    /// By the path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of a file of it. Opening one never waits and follows no link.
    ///
    /// # Errors
    /// No such file, or one that is not trusted: not a regular one, too long, someone else's, or open to others' changes.
    pub fn read(&self, name: &OsStr, most_bytes: u64) -> Result<Vec<u8>, DistrustError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(&self.folder, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            // What the system says of a link that is not followed, and of a socket.
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::NXIO) => return Err(DistrustError::NotRegular),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(DistrustError::NotRegular);
        }
        self.owners.check(&metadata)?;
        let mut bytes = Vec::new();
        file.take(most_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
        match bytes.len() as u64 {
            more if more > most_bytes => {
                Err(DistrustError::TooLong { bytes: metadata.len().max(more), most_bytes })
            }
            _ => Ok(bytes),
        }
    }

    /// Writes a file of it whole or not at all, in place of an older one. Not synchronised with the disk: a power failure may leave
    /// the name of an empty file. Until it has its name it has `.` before and `part_suffix` behind another.
    ///
    /// # Errors
    /// The system refuses.
    pub fn write(&self, name: &OsStr, contents: &[u8], part_suffix: &str) -> io::Result<()> {
        let mut part = tempfile::Builder::new();
        // For all to read who may look into the folder; for nobody else to write.
        let part = part.prefix(".").suffix(part_suffix).permissions(Permissions::from_mode(0o644));
        let mut part = part.tempfile_in(&self.path)?;
        part.write_all(contents)?;
        part.persist(self.path.join(name))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};
    use std::process::Command;

    use super::*;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn kind<T>(result: Result<T, DistrustError>) -> &'static str {
        match result {
            Ok(_) => "ok",
            Err(DistrustError::Io(_)) => "io",
            Err(DistrustError::Owner { .. }) => "owner",
            Err(DistrustError::Writable { .. }) => "writable",
            Err(DistrustError::NotRegular) => "not regular",
            Err(DistrustError::TooLong { .. }) => "too long",
        }
    }

    #[test]
    fn what_others_could_have_put_there_is_not_read() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("made/here");
        assert_eq!(kind(TrustedFolder::open(&path, Owners::default())), "io");
        let folder = TrustedFolder::open_or_make(&path, Owners::default()).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        let read = |name: &str| kind(folder.read(OsStr::new(name), 10));
        folder.write(OsStr::new("a"), b"contents", ".part").unwrap();
        assert_eq!(folder.read(OsStr::new("a"), 8).unwrap(), b"contents");
        assert_eq!(path.join("a").metadata().unwrap().mode() & 0o133, 0);
        assert_eq!((read("a"), read("none")), ("ok", "io"));
        folder.write(OsStr::new("long"), b"more than ten", ".part").unwrap();
        symlink("a", path.join("link")).unwrap();
        fs::create_dir(path.join("folder")).unwrap();
        assert!(Command::new("mkfifo").arg(path.join("pipe")).status().unwrap().success());
        assert_eq!((read("long"), read("link")), ("too long", "not regular"));
        assert_eq!((read("folder"), read("pipe")), ("not regular", "not regular"));
        for mode in [0o664, 0o646, 0o666] {
            chmod(&path.join("a"), mode);
            assert_eq!(read("a"), "writable", "{mode:o}");
        }
        chmod(&path.join("a"), 0o444);
        assert_eq!(read("a"), "ok");
        for mode in [0o770, 0o777, 0o1777] {
            chmod(&path, mode);
            assert_eq!(kind(TrustedFolder::open(&path, Owners::default())), "writable", "{mode:o}");
        }
        chmod(&path, 0o755);
        assert_eq!(kind(TrustedFolder::open(&path, Owners::default())), "ok");
    }

    /// Only root can give files away.
    #[test]
    fn whose_it_is_decides() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("folder");
        let folder = TrustedFolder::open_or_make(&path, Owners::default()).unwrap();
        folder.write(OsStr::new("a"), b"x", ".part").unwrap();
        chown(path.join("a"), Some(12345), None).unwrap();
        assert_eq!(kind(folder.read(OsStr::new("a"), 10)), "owner");
        chown(&path, Some(12345), None).unwrap();
        assert_eq!(kind(TrustedFolder::open(&path, Owners::default())), "owner");
        let folder = TrustedFolder::open(&path, Owners { also: Some(12345) }).unwrap();
        assert_eq!(folder.read(OsStr::new("a"), 10).unwrap(), b"x");
    }
}
