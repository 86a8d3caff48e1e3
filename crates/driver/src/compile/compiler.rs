//! Which NVRTC is used, remembered in the cache's folder so that cached kernels need not open it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use counterpoint_files::TrustedFolder;
use sha2::{Digest, Sha256};

use super::cache::PART_SUFFIX;
use crate::CudaError;
use crate::library::{Nvrtc, SEARCH_VARIABLES};

/// The compiler that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompilerVersion {
    /// Major and minor version of NVRTC, such as (13, 0).
    pub version: (u32, u32),
    /// The library.
    pub path: PathBuf,
    /// Its size, which distinguishes updates of one version.
    pub bytes: u64,
}

/// The compiler that kernels are compiled with.
///
/// # Errors
/// [`CudaError::NoNvrtc`] with the places that were tried.
pub fn compiler_version() -> Result<CompilerVersion, CudaError> {
    let nvrtc = Nvrtc::get()?;
    let path = nvrtc.path().to_owned();
    let bytes = fs::metadata(&path).map_or(0, |metadata| metadata.len());
    Ok(CompilerVersion { version: nvrtc.version(), path, bytes })
}

/// The same, without opening the compiler if it was found before: looking for it may mean asking `python3`, and opening it
/// takes 20 ms, which is most of the time that a process with cached kernels has. `folder` is the cache's; in it a note by
/// the environment says what was found last. It counts as long as that file is what it was.
pub(super) fn remembered_version(folder: &TrustedFolder) -> Result<CompilerVersion, CudaError> {
    let name = note_name();
    if let Some(version) = read_note(folder, &name) {
        return Ok(version);
    }
    let version = compiler_version()?;
    if let Some(stamp) = stamp(&version.path) {
        let (major, minor) = version.version;
        let text = format!("{major}\n{minor}\n{stamp}\n{}\n", version.path.display());
        // Without the note the next process looks for the compiler again.
        let _ = folder.write(name.as_ref(), text.as_bytes(), PART_SUFFIX);
    }
    Ok(version)
}

/// What the search for the compiler depends on, hashed.
fn note_name() -> String {
    let mut hash = Sha256::new();
    for variable in SEARCH_VARIABLES {
        let value = std::env::var_os(variable).unwrap_or_default();
        hash.update(variable.as_bytes());
        hash.update([0]);
        hash.update(value.as_encoded_bytes());
        hash.update([0]);
    }
    let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("compiler-{hash}.txt")
}

/// A note is a few lines.
const MOST_NOTE_BYTES: u64 = 1 << 16;

fn read_note(folder: &TrustedFolder, name: &str) -> Option<CompilerVersion> {
    let text = String::from_utf8(folder.read(name.as_ref(), MOST_NOTE_BYTES).ok()?).ok()?;
    let mut lines = text.lines();
    let major = lines.next()?.parse().ok()?;
    let minor = lines.next()?.parse().ok()?;
    let noted = lines.next()?;
    let path = PathBuf::from(lines.next()?);
    if stamp(&path)? != noted {
        return None;
    }
    let bytes = fs::metadata(&path).ok()?.len();
    Some(CompilerVersion { version: (major, minor), path, bytes })
}

/// Changes when the file does.
fn stamp(path: &Path) -> Option<String> {
    if !path.is_absolute() {
        return None;
    }
    let metadata = fs::metadata(path).ok()?;
    let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{} {}", metadata.len(), modified.as_nanos()))
}
