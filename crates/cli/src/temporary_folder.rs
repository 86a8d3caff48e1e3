//! Folders that nobody keeps.

use std::path::Path;
use std::{fs, io};

use tempfile::TempDir;

use crate::interrupt::Cleanup;

/// A new folder in that for temporary files, which goes with all that is in it, also when we are interrupted.
#[derive(Debug)]
pub(crate) struct TemporaryFolder {
    folder: TempDir,
    _cleanup: Cleanup,
}

impl TemporaryFolder {
    pub(crate) fn new() -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().to_owned();
        // Nobody could be told that it stays.
        let remove = move || drop(fs::remove_dir_all(path));
        Ok(Self { folder, _cleanup: Cleanup::new(remove) })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}
