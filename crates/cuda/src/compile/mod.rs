//! From a kernel's source to a cubin: NVRTC with our headers in memory, in front of a cache on disk.

mod cached;
mod headers;
mod source;
mod translate;

pub(crate) use cached::cubins;
pub use source::KernelSource;
pub use translate::{CompilerVersion, Cubin, compile, compiler_version};
