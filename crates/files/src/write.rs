//! Writing files whole or not at all, several together.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

use crate::{FileId, WriteError};

/// Files that appear together: each is written to a temporary file of its folder first, and only when all of them are
/// whole do they take their places. A reader sees the old contents or the new, never a part; on an error before
/// [`AtomicFiles::commit`], and when this is dropped without it, old files are untouched and nothing is left.
///
/// Through a symbolic link the file that it names is written, also where that does not exist yet. What is no regular
/// file (`/dev/stdout`, a pipe) cannot be replaced and is written to directly.
#[derive(Debug, Default)]
pub struct AtomicFiles {
    staged: Vec<Staged>,
    /// Whether new ones are open to nobody else's changes.
    for_owner: bool,
}

#[derive(Debug)]
struct Staged {
    path: PathBuf,
    target: PathBuf,
    temporary: NamedTempFile,
}

impl AtomicFiles {
    /// Files that their owner trusts later: a new one is open to nobody else's changes, whatever the umask ([`TrustedFolder`](crate::TrustedFolder)).
    pub fn for_owner() -> Self {
        Self { for_owner: true, ..Self::default() }
    }

    /// Writes `bytes` next to the file that `path` names, to take its place later. A device or a pipe gets them now: it
    /// is best given before the files, since what it got cannot be taken back, and what it refuses then stops them all.
    ///
    /// # Errors
    /// The folder is missing or may not be written to, the path is a folder or too long, or the system refuses the write.
    pub fn stage(&mut self, path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
        let io_error = |source| WriteError::Io { path: path.to_owned(), source };
        let target = match Destination::of(path)? {
            Destination::Pipe(_) | Destination::Device => return fs::write(path, bytes).map_err(io_error),
            Destination::File { path, .. } => path,
        };
        let replaced = fs::metadata(&target).ok();
        // What may be seen of a file that replaces another is known only when it has its contents. One that replaces none has
        // the permissions that the process gives to new files: its umask still applies.
        let mode = match (&replaced, self.for_owner) {
            (Some(_), _) => PRIVATE,
            (None, true) => 0o644,
            (None, false) => 0o666,
        };
        let mut temporary = temporary_next_to(path, &target, mode)?;
        temporary.write_all(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::FileTooLarge => {
                WriteError::FileLimit { path: path.to_owned(), bytes: bytes.len() }
            }
            _ => io_error(source),
        })?;
        if let Some(replaced) = &replaced {
            keep_access(temporary.as_file(), replaced).map_err(io_error)?;
        }
        // The data must be on the disk before the name is, or a crash could leave the name of an empty file.
        temporary.as_file().sync_all().map_err(io_error)?;
        self.staged.push(Staged { path: path.to_owned(), target, temporary });
        Ok(())
    }

    /// Puts the staged files in their places, in the order in which they came.
    ///
    /// # Errors
    /// The system refuses a file its place, which takes a change of the folder since it was staged, or a target that may
    /// be written to but not replaced (a mount point). The files before it stay, and the error names them.
    pub fn commit(self) -> Result<(), WriteError> {
        let mut placed = Vec::with_capacity(self.staged.len());
        for Staged { path, target, temporary } in self.staged {
            match temporary.persist(&target) {
                Ok(_) => placed.push(path),
                Err(refused) if placed.is_empty() => {
                    return Err(WriteError::Io { path, source: refused.error });
                }
                Err(refused) => return Err(WriteError::Partly { path, source: refused.error, placed }),
            }
        }
        Ok(())
    }
}

/// Writes one file whole or not at all: [`AtomicFiles`] of one.
///
/// # Errors
/// As [`AtomicFiles::stage`] and [`AtomicFiles::commit`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let mut files = AtomicFiles::default();
    files.stage(path, bytes)?;
    files.commit()
}

/// Where the bytes given to a path go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Into a regular file.
    File {
        /// Its path once every link has been followed.
        path: PathBuf,
        /// Which it is, where it is there.
        id: Option<FileId>,
    },
    /// Into a pipe.
    Pipe(FileId),
    /// Into a device.
    Device,
}

/// Finds out whether [`AtomicFiles`] could write `path`, and where to, so that a long run does not end in vain. Leaves
/// nothing.
///
/// # Errors
/// As [`AtomicFiles::stage`].
pub fn check_writable(path: &Path) -> Result<Destination, WriteError> {
    let destination = Destination::of(path)?;
    if let Destination::File { path: target, .. } = &destination {
        temporary_next_to(path, target, PRIVATE)?;
    }
    Ok(destination)
}

impl Destination {
    /// Whether two paths that lead to these write one file: by the same path, or by links of a file that is there. What devices are
    /// given goes by and replaces nothing, so they may be shared.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File { path, id }, Self::File { path: other_path, id: other_id }) => {
                path == other_path || id.is_some() && id == other_id
            }
            (Self::Pipe(id), Self::Pipe(other)) => id == other,
            _ => false,
        }
    }

    /// The file that is there already, which a read of it would give.
    pub fn id(&self) -> Option<FileId> {
        match self {
            Self::File { id, .. } => *id,
            Self::Pipe(id) => Some(*id),
            Self::Device => None,
        }
    }
}

/// Links that are followed one after the other, as many as Linux follows.
const MAX_LINKS: usize = 40;

impl Destination {
    fn of(path: &Path) -> Result<Self, WriteError> {
        let is_a_folder = || WriteError::IsAFolder { path: path.to_owned() };
        let io_error = |source| WriteError::Io { path: path.to_owned(), source };
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => Err(is_a_folder()),
            Ok(metadata) if metadata.file_type().is_fifo() => Ok(Self::Pipe(FileId::of(&metadata))),
            Ok(metadata) if !metadata.is_file() => Ok(Self::Device),
            Ok(metadata) => {
                let id = Some(FileId::of(&metadata));
                fs::canonicalize(path).map(|path| Self::File { path, id }).map_err(io_error)
            }
            // "reports/" and ".." name folders even where nothing is.
            Err(_) if path.file_name().is_none() || path.as_os_str().to_string_lossy().ends_with('/') => {
                Err(is_a_folder())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::new_file(path)),
            // The temporary file is refused for the same reason, and says it with the folder.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotADirectory | io::ErrorKind::PermissionDenied) =>
            {
                Ok(Self::File { path: path.to_owned(), id: None })
            }
            // A name that is too long, links in a circle.
            Err(error) => Err(io_error(error)),
        }
    }

    /// A file that is not there yet: where `path` is a link to it, the file at its end, as for any program that opens it.
    fn new_file(path: &Path) -> Self {
        let mut end = path.to_owned();
        for _ in 0..MAX_LINKS {
            let Ok(next) = fs::read_link(&end) else { break };
            end = folder_of(&end).join(next);
        }
        // Two ways to write one path must be one destination.
        if let (Ok(folder), Some(name)) = (folder_of(&end).canonicalize(), end.file_name()) {
            end = folder.join(name);
        }
        Self::File { path: end, id: None }
    }
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Gives a file whoever may read and write the one that it replaces, and nobody else.
fn keep_access(file: &fs::File, replaced: &fs::Metadata) -> io::Result<()> {
    let mut mode = replaced.mode() & 0o777;
    if file.metadata()?.gid() != replaced.gid() && fchown(file, None, Some(replaced.gid())).is_err() {
        // Its group cannot be kept, and another one gets no more than everybody.
        mode = mode & !0o070 | (mode & 0o007) << 3 & mode;
    }
    file.set_permissions(fs::Permissions::from_mode(mode))
}

/// For the process's user alone.
const PRIVATE: u32 = 0o600;

/// A new file in the folder of `target`, which nothing else has open.
fn temporary_next_to(path: &Path, target: &Path, mode: u32) -> Result<NamedTempFile, WriteError> {
    let mut builder = Builder::new();
    builder.prefix(".counterpoint-").suffix(".tmp").permissions(fs::Permissions::from_mode(mode));
    let (path, folder) = (path.to_owned(), folder_of(target).to_owned());
    builder.tempfile_in(&folder).map_err(|source| match source.kind() {
        // /proc and its like are there and hold no files of ours.
        io::ErrorKind::NotFound if folder.is_dir() => WriteError::NoNewFiles { path, folder },
        io::ErrorKind::NotFound => WriteError::NoFolder { path, folder },
        io::ErrorKind::NotADirectory => WriteError::NotAFolder { path, folder },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            WriteError::NoPermission { path, folder }
        }
        _ => WriteError::Io { path, source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn writes_and_replaces_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a report.html");
        check_writable(&path).unwrap();
        assert!(entries(folder.path()).is_empty());
        write_atomically(&path, b"one").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        write_atomically(&path, &vec![7; 3 << 20]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), vec![7; 3 << 20]);
        assert_eq!(entries(folder.path()), ["a report.html"]);
    }

    #[test]
    fn errors_name_the_cause_and_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("no").join("x.json");
        for result in [write_atomically(&missing, b"x"), check_writable(&missing).map(drop)] {
            let error = result.unwrap_err();
            assert!(matches!(error, WriteError::NoFolder { .. }), "{error}");
            assert!(error.to_string().contains(missing.to_str().unwrap()));
        }
        let error = write_atomically(folder.path(), b"x").unwrap_err();
        assert!(matches!(error, WriteError::IsAFolder { .. }), "{error}");
        let error = write_atomically(&folder.path().join("new/"), b"x").unwrap_err();
        assert!(matches!(error, WriteError::IsAFolder { .. }), "{error}");
        let file = folder.path().join("file");
        fs::write(&file, b"old").unwrap();
        let error = write_atomically(&file.join("x"), b"x").unwrap_err();
        assert!(matches!(error, WriteError::NotAFolder { .. }), "{error}");
        let long = folder.path().join("x".repeat(300));
        for result in [write_atomically(&long, b"x"), check_writable(&long).map(drop)] {
            let error = result.unwrap_err();
            assert!(matches!(error, WriteError::Io { .. }), "{error}");
        }
        assert_eq!(entries(folder.path()), ["file"]);
        assert_eq!(fs::read(&file).unwrap(), b"old");
    }

    #[test]
    fn files_appear_together_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| folder.path().join(name));
        fs::write(&a, b"old").unwrap();
        let mut files = AtomicFiles::default();
        files.stage(&a, b"new").unwrap();
        files.stage(&b, b"new").unwrap();
        assert_eq!(fs::read(&a).unwrap(), b"old");
        assert!(files.stage(&folder.path().join("no").join("x"), b"x").is_err());
        drop(files);
        assert_eq!(entries(folder.path()), ["a"]);
        assert_eq!(fs::read(&a).unwrap(), b"old");

        let mut files = AtomicFiles::default();
        files.stage(&a, b"new").unwrap();
        files.stage(&b, b"newer").unwrap();
        files.commit().unwrap();
        assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"new".to_vec(), b"newer".to_vec()));

        // A folder that takes a staged file's place meanwhile: what is there by then is named.
        let mut files = AtomicFiles::default();
        files.stage(&a, b"newest").unwrap();
        files.stage(&c, b"x").unwrap();
        fs::create_dir(&c).unwrap();
        let error = files.commit().unwrap_err();
        assert!(matches!(&error, WriteError::Partly { placed, .. } if *placed == [a.clone()]), "{error}");
        assert_eq!(error.path(), c);
        assert!(error.to_string().contains(a.to_str().unwrap()), "{error}");
        assert_eq!(entries(folder.path()), ["a", "b", "c"]);
    }

    #[test]
    fn a_link_to_nothing_is_followed() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let [link, second, file] = ["link", "second", "file"].map(|name| folder.path().join(name));
        symlink("second", &link).unwrap();
        symlink("file", &second).unwrap();
        assert_eq!(check_writable(&link).unwrap(), check_writable(&file).unwrap());
        write_atomically(&link, b"x").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(fs::symlink_metadata(&file).unwrap().is_file());
        assert_eq!(fs::read(&link).unwrap(), b"x");
        symlink("gone/x", folder.path().join("lost")).unwrap();
        let error = write_atomically(&folder.path().join("lost"), b"x").unwrap_err();
        assert!(matches!(error, WriteError::NoFolder { .. }), "{error}");
        symlink("circle", folder.path().join("circle")).unwrap();
        let error = write_atomically(&folder.path().join("circle"), b"x").unwrap_err();
        assert!(matches!(error, WriteError::Io { .. }), "{error}");
    }

    #[test]
    fn a_folder_that_takes_no_files() {
        let error = check_writable(Path::new("/proc/x")).unwrap_err();
        assert!(matches!(error, WriteError::NoNewFiles { .. }), "{error}");
    }

    #[test]
    fn follows_links_keeps_permissions_and_spares_devices() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, b"old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        write_atomically(&link, b"new").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        write_atomically(Path::new("/dev/null"), b"gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn a_folder_without_write_permission() {
        let folder = tempfile::tempdir().unwrap();
        let locked = folder.path().join("locked");
        fs::create_dir(&locked).unwrap();
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
        let result = write_atomically(&locked.join("x"), b"x");
        // The superuser may write everywhere: then it must have worked.
        match result {
            Ok(()) => assert_eq!(entries(&locked), ["x"]),
            Err(error) => {
                assert!(matches!(error, WriteError::NoPermission { .. }), "{error}");
                assert!(entries(&locked).is_empty());
            }
        }
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// What replaces a private file is private from its first byte on.
    #[test]
    fn a_private_file_is_private_all_the_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"old").unwrap();
        for mode in [0o600, 0o640, 0o644, 0o4755] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let temporary = temporary_next_to(&file, &file, PRIVATE).unwrap();
            assert_eq!(temporary.as_file().metadata().unwrap().mode() & 0o777, 0o600);
            let mut files = AtomicFiles::default();
            files.stage(&file, b"new").unwrap();
            assert_eq!(files.staged[0].temporary.as_file().metadata().unwrap().mode() & 0o7777, mode & 0o777);
            files.commit().unwrap();
            assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, mode & 0o777);
        }
    }
}
