//! Folders that nobody keeps.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::{fs, io};

use counterpoint_files::temporary_folder;
use tempfile::TempDir;

use crate::interrupt::Cleanup;

/// A new folder in that for temporary files, which goes with all that is in it, also when we are interrupted.
#[derive(Debug)]
pub struct TemporaryFolder {
    folder: TempDir,
    _cleanup: Cleanup,
}

impl TemporaryFolder {
    /// Makes it.
    pub fn new() -> io::Result<Self> {
        // For this user alone, and never in the current folder.
        let mut builder = tempfile::Builder::new();
        builder.permissions(fs::Permissions::from_mode(0o700));
        let folder = builder.tempdir_in(temporary_folder())?;
        let path = folder.path().to_owned();
        // There is no one to report to that it stays.
        let remove = move || drop(fs::remove_dir_all(path));
        Ok(Self { folder, _cleanup: Cleanup::new(remove) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}
