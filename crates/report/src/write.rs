use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile};

use crate::ReportError;

/// Writes the file whole or not at all: into a temporary file of the same folder, which then takes the place of `path`.
/// A reader sees the old contents or the new, never a part; on an error the old file is untouched and nothing is left.
/// Through a symbolic link the file that it names is replaced. What is no regular file (`/dev/stdout`, a pipe) cannot be
/// replaced and is written to directly.
///
/// # Errors
/// The folder is missing or may not be written to, the path is a folder, or the system refuses the write.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), ReportError> {
    let io_error = |source| ReportError::Io { path: path.to_owned(), source };
    let target = match Target::of(path)? {
        Target::Special => return fs::write(path, bytes).map_err(io_error),
        Target::File(target) => target,
    };
    let mut temporary = temporary_beside(path, &target)?;
    temporary.write_all(bytes).map_err(io_error)?;
    // A replaced file keeps its permissions; a new one has those that the process gives to new files.
    if let Ok(existing) = fs::metadata(&target) {
        temporary.as_file().set_permissions(existing.permissions()).map_err(io_error)?;
    }
    // The data must be on the disk before the name is, or a crash could leave the name of an empty file.
    temporary.as_file().sync_all().map_err(io_error)?;
    temporary.persist(&target).map_err(|error| io_error(error.error))?;
    Ok(())
}

/// Finds out whether [`write_atomically`] could write `path`, so that a long run does not end in vain. Leaves nothing.
///
/// # Errors
/// As [`write_atomically`].
pub fn check_writable(path: &Path) -> Result<(), ReportError> {
    match Target::of(path)? {
        Target::Special => Ok(()),
        Target::File(target) => temporary_beside(path, &target).map(drop),
    }
}

/// What a path names.
enum Target {
    /// A regular file, or none yet.
    File(PathBuf),
    /// A device or a pipe.
    Special,
}

impl Target {
    fn of(path: &Path) -> Result<Self, ReportError> {
        let is_a_folder = || ReportError::IsAFolder { path: path.to_owned() };
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => Err(is_a_folder()),
            Ok(metadata) if !metadata.is_file() => Ok(Target::Special),
            Ok(_) => {
                let real = fs::canonicalize(path);
                real.map(Target::File).map_err(|source| ReportError::Io { path: path.to_owned(), source })
            }
            // "reports/" and ".." name folders even where nothing is.
            Err(_) if path.file_name().is_none() || path.as_os_str().to_string_lossy().ends_with('/') => {
                Err(is_a_folder())
            }
            Err(_) => Ok(Target::File(path.to_owned())),
        }
    }
}

fn temporary_beside(path: &Path, target: &Path) -> Result<NamedTempFile, ReportError> {
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = Builder::new();
    builder.prefix(".counterpoint-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Temporary files are private by default; a report is not. The process's umask still applies.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let (path, folder) = (path.to_owned(), folder.to_owned());
    builder.tempfile_in(&folder).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ReportError::NoFolder { path, folder },
        io::ErrorKind::NotADirectory => ReportError::NotAFolder { path, folder },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ReportError::NoPermission { path, folder }
        }
        _ => ReportError::Io { path, source },
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
        for result in [write_atomically(&missing, b"x"), check_writable(&missing)] {
            let error = result.unwrap_err();
            assert!(matches!(error, ReportError::NoFolder { .. }), "{error}");
            assert!(error.to_string().contains(missing.to_str().unwrap()));
        }
        let error = write_atomically(folder.path(), b"x").unwrap_err();
        assert!(matches!(error, ReportError::IsAFolder { .. }), "{error}");
        let error = write_atomically(&folder.path().join("new/"), b"x").unwrap_err();
        assert!(matches!(error, ReportError::IsAFolder { .. }), "{error}");
        let file = folder.path().join("file");
        fs::write(&file, b"old").unwrap();
        let error = write_atomically(&file.join("x"), b"x").unwrap_err();
        assert!(matches!(error, ReportError::NotAFolder { .. }), "{error}");
        let long = folder.path().join("x".repeat(300));
        let error = write_atomically(&long, b"x").unwrap_err();
        assert!(matches!(error, ReportError::Io { .. }), "{error}");
        assert_eq!(entries(folder.path()), ["file"]);
        assert_eq!(fs::read(&file).unwrap(), b"old");
    }

    #[cfg(unix)]
    #[test]
    fn follows_links_keeps_permissions_and_spares_devices() {
        use std::os::unix::fs::{PermissionsExt, symlink};
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

    #[cfg(unix)]
    #[test]
    fn a_folder_without_write_permission() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let locked = folder.path().join("locked");
        fs::create_dir(&locked).unwrap();
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
        let result = write_atomically(&locked.join("x"), b"x");
        // The superuser may write everywhere: then it must have worked.
        match result {
            Ok(()) => assert_eq!(entries(&locked), ["x"]),
            Err(error) => {
                assert!(matches!(error, ReportError::NoPermission { .. }), "{error}");
                assert!(entries(&locked).is_empty());
            }
        }
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
    }
}
