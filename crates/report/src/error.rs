use std::{io, path::PathBuf};

use thiserror::Error;

/// Why a file cannot be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReportError {
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
    /// The system refused: a full disk, a name that is too long.
    #[error("cannot write {path}: {source}; nothing was written, so mend the cause and run again")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}
