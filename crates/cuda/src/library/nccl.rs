use std::ffi::c_int;
use std::path::PathBuf;

use super::search;
use crate::CudaError;

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryVersion {
    /// Such as `2.28.9`.
    pub version: String,
    /// Where it is.
    pub path: PathBuf,
}

/// The NCCL that collectives between GPUs would use.
///
/// # Errors
/// [`CudaError::NoNccl`] with the places that were tried.
pub fn nccl_version() -> Result<LibraryVersion, CudaError> {
    let mut tried = Vec::new();
    for path in search::nccl() {
        match open(&path) {
            Ok(version) => return Ok(LibraryVersion { version, path: search::opened_file(&path) }),
            Err(reason) => tried.push(super::tell(&path, &reason)),
        }
    }
    tried.extend(search::notes(search::NCCL_VARIABLE, "libnccl.so"));
    Err(CudaError::NoNccl { tried })
}

fn open(path: &PathBuf) -> Result<String, String> {
    // SAFETY: initialisers of NCCL do not depend on us. The library stays open: it may have started threads.
    let library = std::mem::ManuallyDrop::new(unsafe { super::open(path) }?);
    let mut version: c_int = 0;
    // SAFETY: the signature is that of nccl.h, the pointer is to a local.
    let code = unsafe {
        let function = library
            .get::<unsafe extern "C" fn(*mut c_int) -> u32>(b"ncclGetVersion\0")
            .map_err(|error| error.to_string())?;
        function(&mut version)
    };
    if code != 0 {
        return Err(format!("ncclGetVersion gave {code}"));
    }
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}
