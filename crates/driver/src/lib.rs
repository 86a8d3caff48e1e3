//! The CUDA driver and the libraries around it, opened at run time: devices, memory, streams, events, launches, graphs, and the
//! compilation of kernels.
//!
//! It knows no kernel, no Program and no rank. Building it needs no toolkit and starting a program that links it needs no library: each is
//! looked for when something of it is first asked for.
#![warn(clippy::unwrap_used)]
#![allow(unsafe_code)]

mod arch;
mod compile;
mod copies;
mod device;
mod environment;
mod error;
mod event;
mod function;
mod graph;
mod graph_update;
mod guards;
mod host_records;
mod inside;
mod launch;
mod library;
mod load_fault;
mod loaded_kernels;
mod memory;
mod partition;
mod pool;
mod refusal;
mod spare_events;
mod stream;
mod stream_ends;
mod tensor_map;

pub use arch::{Arch, Capability};
pub use compile::{
    CACHE_OWNER_VARIABLE, CACHE_VARIABLE, CacheUse, CacheWarning, CachedCubin, CompilerVersion, Cubin,
    CubinCache, CubinOrigin, Header, HeaderSet, KernelSource, MatrixInstructions, compile, compiler_version,
    count_matrix_instructions, map_parallel,
};
pub use copies::{PitchedCopy, copy_bytes};
pub use device::{Current, Device, DeviceProperties, MemoryUse};
pub use environment::ENVIRONMENT;
pub use error::{CudaError, StrideFault};
pub use event::Event;
pub use function::Function;
pub use graph::Graph;
pub use graph_update::{CallGraph, CapturedCall, GraphHandles};
pub use guards::{GuardReport, Overwrite};
pub use inside::{Inside, end_process};
pub use launch::{KernelArguments, Launch, LaunchStart};
pub use library::{
    CublasLt, DriverCalls, LibraryVersion, Nccl, NcclConfig, NcclCtaPolicy, NcclHandle, NcclProgress,
    NcclUniqueId, NvtxDomain, cublaslt_types, nccl_version, search_packages,
};
pub use load_fault::{LoadFault, PackagesFault, TriedPlace};
pub use loaded_kernels::FunctionAttributes;
pub use memory::{AllocationPlace, DeviceBuffer, MemoryGuard, OpenedMemory, PinnedBuffer, RecordPlace};
pub use partition::{Part, Partition};
pub use pool::{AllocationError, DeviceAllocator, Lender};
pub use refusal::{GraphFault, LaunchFault, Refusal, TensorMapFault};
pub use stream::{RawStream, Stream, StreamPriority};
pub use stream_ends::GivenWork;
pub use tensor_map::{L2Promotion, Swizzle, TensorMap, TensorMapElement, TensorMapSpec};
