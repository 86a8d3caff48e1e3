//! The launcher of `foreign_barrier.cuh`: a stand-in for NCCL's kernels that run concurrently with ours, for tests of deadlock.

use std::time::Duration;

use super::{MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 32;

/// A kernel that behaves like one of another library's collectives: its blocks hold multiprocessors until those of its peers have started.
#[derive(Debug)]
pub struct ForeignBarrier(Function);

/// One phase of a peer.
#[derive(Clone, Copy, Debug)]
pub struct ForeignBarrierPhase {
    /// Of a u64 for each peer and block, which all peers reach; all 0 before the first phase.
    pub started: u64,
    /// Of a u64 for each peer: the last phase at which it gave up.
    pub missed: u64,
    /// How long it waits.
    pub limit: Duration,
    /// From 1.
    pub phase: u64,
    /// This one.
    pub peer: usize,
    /// At most 32.
    pub peers: usize,
}

/// `ForeignBarrierCall` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct ForeignBarrierCall {
    started: u64,
    missed: u64,
    nanoseconds: u64,
    phase: u64,
    peer: u32,
    peers: u32,
}

impl ForeignBarrier {
    /// The kernel, loaded.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.function(&source(device.arch())).map(Self)
    }

    /// Enqueues a phase of so many blocks, each on a multiprocessor of its own.
    ///
    /// # Safety
    /// The words live until the kernel has run, and all peers take part with as many blocks.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        round: &ForeignBarrierPhase,
        blocks: u32,
    ) -> Result<(), CudaError> {
        let call = ForeignBarrierCall {
            started: round.started,
            missed: round.missed,
            nanoseconds: u64::try_from(round.limit.as_nanos()).unwrap_or(u64::MAX),
            phase: round.phase,
            peer: round.peer as u32,
            peers: round.peers as u32,
        };
        let shared = self.0.attributes().max_dynamic_shared_bytes / 8 * 7;
        let launch = Launch::linear(blocks, THREADS).shared_bytes(shared as u32);
        // SAFETY: the argument is that of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.0.launch(stream, &launch, &(call,)) }
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("foreign_barrier", arch)
        .line("#include \"foreign_barrier.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(
            "foreign_barrier(const __grid_constant__ ForeignBarrierCall call) { \
             counterpoint::foreign_barrier(call); }",
        )
}

/// The only one.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: 255 }]
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "foreign_barrier.cuh",
        ForeignBarrierCall { started, missed, nanoseconds, phase, peer, peers }
    )]
}
