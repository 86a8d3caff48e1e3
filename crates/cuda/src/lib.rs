//! The CUDA backend: kernels and their launchers, the backend and the transports of crate `exec`, on what crate `driver` wraps.
//!
//! Building it needs no toolkit and starting a program that links it needs no library:
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

mod backend;
mod described_gpu;
mod environment;
mod headers;
pub mod kernel;
mod layout;
mod machine;
mod sync;
mod transport;
mod transport_fault;

pub use backend::{
    CudaBackend, CudaBarrier, CudaBuffer, CudaKernel, CudaSignal, CudaStream, CudaTables, GraphRun,
    PassOrder, Passes, PlainProducts, Timing, exec_error,
};
pub use counterpoint_driver::{
    AllocationError, Arch, CACHE_OWNER_VARIABLE, CACHE_VARIABLE, CacheUse, CacheWarning, CachedCubin,
    CallGraph, Capability, CapturedCall, CompilerVersion, Cubin, CubinCache, CubinOrigin, CudaError, Device,
    DeviceAllocator, DeviceBuffer, DeviceProperties, DriverCalls, Event, Function, FunctionAttributes, Graph,
    GraphFault, GraphHandles, GuardReport, KernelArguments, KernelSource, L2Promotion, Launch, LaunchFault,
    LaunchStart, LibraryVersion, MemoryGuard, MemoryUse, NcclCtaPolicy, Overwrite, PinnedBuffer, Refusal,
    Stream, StreamPriority, StrideFault, Swizzle, TensorMap, TensorMapElement, TensorMapFault, TensorMapSpec,
    compile, compiler_version, end_process, nccl_version, search_packages,
};
pub use counterpoint_nccl::{
    NcclFault, NcclRank, NcclSettingFault, NcclSettings, NcclSums, decide_about_nccl,
};
pub use described_gpu::DescribedGpu;
pub use environment::ENVIRONMENT;
pub use headers::kernel_source;
pub use kernel::{
    AttentionFault, CompileReport, GemmFault, KernelFault, KernelReport, ProblemFault, RowsFault, examine,
};
pub use layout::SharedLayout;
pub use machine::{CudaMachine, CudaProcess};
pub use transport::{
    CudaCollective, CudaPending, CudaTransport, EngineUse, LevelledCollective, LevelledPending,
    LevelledTransport, TransportKind, TransportKindError,
};
pub use transport_fault::{CallFault, TransportFault, Unreached};
