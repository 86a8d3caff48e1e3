//! Libraries that are opened at run time. Nothing is opened before it is asked for, and a library that is not there, or
//! lacks a function, is an error with a sentence, never a panic.

mod cublaslt;
mod driver;
mod driver_calls;
mod nccl;
mod nvrtc;
mod nvtx;
mod search;
mod table;

use libloading::Library;

use crate::LoadFault;

pub use cublaslt::{CublasLt, cublaslt_types};
pub(crate) use driver::{Driver, call};
pub use driver_calls::DriverCalls;
pub use nccl::{
    LibraryVersion, Nccl, NcclConfig, NcclCtaPolicy, NcclHandle, NcclProgress, NcclUniqueId, nccl_version,
};
pub(crate) use nvrtc::Nvrtc;
pub use nvtx::NvtxDomain;
pub use search::search_packages;
pub(crate) use search::{CUBLASLT_VARIABLE, NCCL_VARIABLE, NVRTC_VARIABLE, SEARCH_VARIABLES};

/// Opens a library, by path or by a name that the loader knows.
///
/// # Safety
/// The library's initialisers must be harmless to this program.
unsafe fn open(library: impl libloading::AsFilename) -> Result<Library, LoadFault> {
    // SAFETY: the caller's promise.
    unsafe { Library::new(library) }.map_err(|error| {
        let words = std::error::Error::source(&error).map(ToString::to_string);
        LoadFault::Loader { text: words.unwrap_or_else(|| error.to_string()) }
    })
}
