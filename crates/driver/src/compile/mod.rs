//! From a kernel's source to a cubin: NVRTC with headers in memory, behind a cache on disk.

mod cache;
mod compiler;
mod elf;
mod entry;
mod headers;
mod parallel;
mod source;
mod translate;

pub use cache::{
    CACHE_OWNER_VARIABLE, CACHE_VARIABLE, CacheUse, CacheWarning, CachedCubin, CubinCache, CubinOrigin,
};
pub use compiler::{CompilerVersion, compiler_version};
pub(crate) use elf::count_arguments;
pub use elf::{MatrixInstructions, count_matrix_instructions};
pub use headers::{Header, HeaderSet};
pub use parallel::map_parallel;
pub use source::KernelSource;
pub use translate::{Cubin, compile};
