//! The CUDA backend: libraries opened at run time, streams, memory, kernels and their compilation.
//!
//! The only crate that names CUDA. Building it needs no toolkit and starting a program that links it needs no library:
//! both are looked for when a device is first asked for.
//!
//! ```no_run
//! use counterpoint_cuda::{CudaError, Device, DeviceBuffer, KernelSource, Launch, Stream, StreamPriority};
//!
//! # fn main() -> Result<(), CudaError> {
//! let device = Device::open(0)?;
//! let stream = Stream::new(&device, StreamPriority::Low)?;
//! let source = KernelSource::new("double_all", device.arch())
//!     .line("extern \"C\" __global__ void double_all(float* x) { x[threadIdx.x] *= 2; }");
//! let double_all = device.function(&source)?; // compiled, or from the cache
//! let x = DeviceBuffer::from_slice(&stream, &[1.0f32, 2.0, 3.0])?;
//! // SAFETY: three threads change the three numbers that `x` holds, and `x` lives until they are downloaded.
//! unsafe { double_all.launch(&stream, &Launch::linear(1, 3), &(x.address(),)) }?;
//! assert_eq!(x.download::<f32>(&stream, 0, 3)?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```
#![warn(clippy::unwrap_used)]
#![allow(unsafe_code)]

mod arch;
mod backend;
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
pub mod kernel;
mod launch;
mod layout;
mod library;
mod loaded_kernels;
mod machine;
mod memory;
mod nccl;
mod partition;
mod pool;
mod spare_events;
mod stream;
mod stream_ends;
mod sync;
mod tensor_map;
mod transport;

pub use arch::{Arch, Capability};
pub use backend::{
    CudaBackend, CudaBarrier, CudaBuffer, CudaKernel, CudaSignal, CudaStream, GraphRun, PassOrder, Passes,
    PlainProducts, Timing, exec_error,
};
pub use compile::{
    CACHE_OWNER_VARIABLE, CACHE_VARIABLE, CacheUse, CacheWarning, CachedCubin, CompilerVersion, Cubin,
    CubinCache, CubinOrigin, KernelSource, compile, compiler_version,
};
pub use device::{Device, DeviceProperties, MemoryUse};
pub use environment::ENVIRONMENT;
pub use error::CudaError;
pub use event::Event;
pub use function::Function;
pub use graph::Graph;
pub use graph_update::{CallGraph, CapturedCall, GraphHandles};
pub use guards::{GuardReport, Overwrite};
pub use inside::end_process;
pub use kernel::{CompileReport, KernelFault, KernelReport, examine};
pub use launch::{KernelArguments, Launch, LaunchStart};
pub use layout::SharedLayout;
pub use library::{DriverCalls, LibraryVersion, nccl_version, search_packages};
pub use loaded_kernels::FunctionAttributes;
pub use machine::{CudaMachine, CudaProcess};
pub use memory::{DeviceBuffer, MemoryGuard, PinnedBuffer};
pub use nccl::NcclRank;
pub use pool::{AllocationError, DeviceAllocator};
pub use stream::{Stream, StreamPriority};
pub use tensor_map::{L2Promotion, Swizzle, TensorMap, TensorMapElement, TensorMapSpec};
pub use transport::{
    CudaCollective, CudaMeeting, CudaTransport, EngineUse, LevelledCollective, LevelledMeeting,
    LevelledTransport, TransportKind,
};
