//! What goes wrong with GPUs: libraries that are missing, driver, NVRTC and NCCL errors, memory, launches, tensors.

use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::load_fault::{LoadFault, TriedPlace, list_places};
use crate::{GraphFault, Refusal, TensorMapFault};

/// What kernels do not take of the strides of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StrideFault {
    /// It is not of three axes.
    #[error("it has {axes} axes; rows, heads and elements are needed")]
    Axes {
        /// Its axes.
        axes: usize,
    },
    /// Some element has two indices.
    #[error("its rows or heads overlap")]
    Overlap,
    /// Rows or heads begin between 16 bytes.
    #[error("its strides must be multiples of 16 bytes")]
    Alignment,
}

/// Why something on a CUDA device, or the way to one, did not work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library cannot be opened.
    #[error(
        "no NVIDIA driver: libcuda.so.1 cannot be opened ({reason}); install the driver, or in a container pass the GPU \
         through (--gpus all)"
    )]
    NoDriver {
        /// Why not.
        reason: LoadFault,
    },
    /// A library is there, but too old to have a function that we call.
    #[error("{} has no function {symbol}; {remedy}", path.display())]
    MissingSymbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// The driver is there, but no GPU.
    #[error("the NVIDIA driver finds no GPU ({text}); check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// The driver's own words.
        text: String,
    },
    /// There are fewer GPUs than asked for.
    #[error(
        "there is no GPU {ordinal}: this machine has {count}, numbered from 0; check CUDA_VISIBLE_DEVICES"
    )]
    DeviceOrdinal {
        /// The one asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// Memory that other processes are to read, of a kind that they cannot open.
    #[error(
        "other ranks of this host cannot open {bytes} bytes of this rank's memory ({text}); the system must let processes share \
         memory of GPUs (containers: --ipc=host)"
    )]
    NotShareable {
        /// Of the allocation.
        bytes: usize,
        /// The driver's refusal.
        text: String,
    },
    /// No NVRTC was found: kernels cannot be compiled.
    #[error(
        "NVRTC, which compiles the kernels, was not found; run `pip install nvidia-cuda-nvrtc==13.0.88`, or name its folder \
         in COUNTERPOINT_NVRTC_DIR. Tried: {}",
        list_places(tried)
    )]
    NoNvrtc {
        /// Each place, with what is wrong there.
        tried: Vec<TriedPlace>,
    },
    /// No NCCL was found: GPUs cannot exchange data with other processes' GPUs.
    #[error(
        "NCCL was not found; run `pip install nvidia-nccl-cu13`, or name its folder in COUNTERPOINT_NCCL_DIR. Tried: {}",
        list_places(tried)
    )]
    NoNccl {
        /// Each place, with what is wrong there.
        tried: Vec<TriedPlace>,
    },
    /// No cuBLASLt was found: matrix products can only be computed by our own kernels.
    #[error(
        "cuBLASLt was not found; run `pip install nvidia-cublas`, or name its folder in COUNTERPOINT_CUBLAS_DIR. Tried: {}",
        list_places(tried)
    )]
    NoCublasLt {
        /// Each place, with what is wrong there.
        tried: Vec<TriedPlace>,
    },
    /// A call of cuBLASLt failed.
    #[error("{call} failed: {text} ({code})")]
    CublasLt {
        /// The function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// cuBLASLt's own words.
        text: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {name} ({code}), {text}")]
    Driver {
        /// The function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// The result's name, such as `CUDA_ERROR_LAUNCH_FAILED`.
        name: String,
        /// The driver's own words.
        text: String,
    },
    /// Memory of a device, or pinned memory of the host, is used up.
    #[error("{what} of {bytes} bytes cannot be allocated: {free} of {total} bytes of the GPU are free")]
    OutOfMemory {
        /// What was to be allocated.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// Bytes that are free.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// An allocator that the machine was given failed, and not for want of memory.
    #[error("the allocator of device memory that was given failed: {text}")]
    Allocator {
        /// Its own words.
        text: String,
    },
    /// A call of NVRTC failed for another reason than the source.
    #[error("{call} failed: {text} ({code})")]
    Nvrtc {
        /// The function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// NVRTC's own words.
        text: String,
    },
    /// A call of NCCL failed.
    #[error("{call} failed: {text} ({code}); NCCL_DEBUG=INFO prints more")]
    Nccl {
        /// The function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// NCCL's own words.
        text: String,
    },
    /// Two GPUs cannot read each other's memory.
    #[error(
        "GPU {from} cannot reach the memory of GPU {to} ({text}); use --transport nccl, or GPUs of one host that \
         nvidia-smi topo -p2p r shows as OK"
    )]
    NoPeerAccess {
        /// The one that would read and write.
        from: usize,
        /// Whose memory it is.
        to: usize,
        /// The driver's own words.
        text: String,
    },
    /// A transport that these ranks cannot use, or that did not come to its end.
    #[error("transport {transport}: {reason}")]
    Transport {
        /// Its name.
        transport: &'static str,
        /// Why, in an error of the crate that has the transport.
        reason: Refusal,
    },
    /// A kernel does not compile.
    #[error("kernel {kernel} does not compile for {arch}:\n{log}")]
    Compile {
        /// Its name.
        kernel: String,
        /// The architecture.
        arch: String,
        /// The compiler's own words.
        log: String,
    },
    /// A tensor map that the copy engine cannot use.
    #[error("no tensor map for {tensor}: {reason}")]
    TensorMap {
        /// The tensor's name.
        tensor: String,
        /// Which restriction it breaks, with figures.
        reason: TensorMapFault,
    },
    /// A launch that the kernel or the device cannot take.
    #[error("kernel {kernel} cannot be launched: {reason}")]
    Launch {
        /// Its name.
        kernel: String,
        /// What is wrong, with figures: a [`LaunchFault`](crate::LaunchFault), or an error of the crate that has the kernel.
        reason: Refusal,
    },
    /// A copy beyond the end of a buffer.
    #[error("bytes {offset}..{} lie outside of a buffer of {len} bytes", offset.saturating_add(*bytes))]
    OutOfBounds {
        /// The first byte.
        offset: usize,
        /// How many.
        bytes: usize,
        /// The buffer's size.
        len: usize,
    },
    /// The system starts no thread to wait for a GPU.
    #[error(
        "no thread can be started to wait for the GPU ({text}), so its memory is freed when this process ends"
    )]
    NoThread {
        /// In the system's words.
        text: String,
    },
    /// A GPU waits for a process that is gone.
    #[error(
        "the GPU did not end in {waited:?} what it had been given before a process was lost; its memory is freed when this process ends"
    )]
    NeverEnds {
        /// How long it was waited for.
        waited: Duration,
    },
    /// A tensor that kernels cannot load 16 bytes at a time.
    #[error(
        "a tensor begins at {address:#x}, which is not a multiple of 16; copy it to the begin of an allocation"
    )]
    Misaligned {
        /// Its first byte's address.
        address: u64,
    },
    /// A tensor whose rows or heads lie where no kernel takes them.
    #[error(
        "a tensor of shape {shape:?} with strides of {strides:?} elements between rows and heads: {reason}"
    )]
    Strides {
        /// Rows, heads and elements of a head.
        shape: Vec<usize>,
        /// In elements.
        strides: [usize; 2],
        /// Why not.
        reason: StrideFault,
    },
    /// A stream that is somebody else's is none any more.
    #[error(
        "the stream has been destroyed; its owner keeps it until calls on it have been made and what borrowed it is dropped"
    )]
    StreamGone,
    /// A graph cannot be captured from a stream.
    #[error("a graph cannot be captured: {reason}")]
    Capture {
        /// What is wrong.
        reason: GraphFault,
    },
}

impl CudaError {
    /// Whether the driver says that what it was asked about is no stream (any more).
    pub fn is_of_no_stream(&self) -> bool {
        const INVALID_HANDLE: u32 = 400;
        const CONTEXT_IS_DESTROYED: u32 = 709;
        matches!(self, Self::Driver { call, code: INVALID_HANDLE | CONTEXT_IS_DESTROYED, .. } if call.starts_with("cuStream"))
    }

    /// Whether the machine lacks something (a driver, a GPU, a library), as opposed to something going wrong.
    pub fn is_missing(&self) -> bool {
        matches!(
            self,
            Self::NoDriver { .. }
                | Self::MissingSymbol { .. }
                | Self::NoDevice { .. }
                | Self::DeviceOrdinal { .. }
                | Self::NoNvrtc { .. }
                | Self::NoNccl { .. }
                | Self::NoCublasLt { .. }
                | Self::NoPeerAccess { .. }
        )
    }
}
