//! Why a file cannot be written.

use std::{
    io,
    path::{Path, PathBuf},
};

use thiserror::Error;

/// Why a file cannot be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The folder that should hold the file is not there.
    #[error("cannot write {path}: the folder {folder} does not exist; create it or choose another path")]
    NoFolder {
        /// The file.
        path: PathBuf,
        /// The folder that is missing.
        folder: PathBuf,
    },
    /// What should be the folder is something else.
    #[error("cannot write {path}: {folder} is not a folder; choose another path")]
    NotAFolder {
        /// The file.
        path: PathBuf,
        /// The part of the path that is not a folder.
        folder: PathBuf,
    },
    /// The path is that of a folder.
    #[error("cannot write {path}: it is a folder; give the path of a file")]
    IsAFolder {
        /// The path.
        path: PathBuf,
    },
    /// The folder may not be written to.
    #[error(
        "cannot write {path}: no permission to create files in {folder}; change its permissions or choose another path"
    )]
    NoPermission {
        /// The file.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// The folder is there, and its file system makes no new files.
    #[error("cannot write {path}: no files can be created in {folder}; choose another path")]
    NoNewFiles {
        /// The file.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// Files may not become as long.
    #[error(
        "cannot write {path}: {bytes} bytes are more than a file may have here (ulimit -f); no file was changed, so raise the limit and \
         run again"
    )]
    FileLimit {
        /// The file.
        path: PathBuf,
        /// What was to be written.
        bytes: usize,
    },
    /// The system refused: a full disk, a name that is too long.
    #[error("cannot write {path}: {source}; no file was changed, so mend the cause and run again")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused a whole file its place, after others had taken theirs.
    #[error("cannot write {path}: {source}; written before it: {}", listed(placed))]
    Partly {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// The files that are in place.
        placed: Vec<PathBuf>,
    },
}

impl WriteError {
    /// The file that cannot be written.
    pub fn path(&self) -> &Path {
        match self {
            Self::NoFolder { path, .. }
            | Self::NotAFolder { path, .. }
            | Self::IsAFolder { path }
            | Self::NoPermission { path, .. }
            | Self::NoNewFiles { path, .. }
            | Self::FileLimit { path, .. }
            | Self::Io { path, .. }
            | Self::Partly { path, .. } => path,
        }
    }
}

fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
