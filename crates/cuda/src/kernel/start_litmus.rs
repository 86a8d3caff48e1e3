//! The launcher of `start_litmus.cuh`: which of two kernels began first, by the blocks' own clocks.

use super::{MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, Event, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 32;

/// A kernel whose blocks write down when they begin and then stay for a while.
#[derive(Debug)]
pub struct StartLitmus(Function);

impl StartLitmus {
    /// Dynamic shared memory with which one block fills a multiprocessor that has `bytes` of it.
    const fn shared_bytes(bytes: usize) -> u32 {
        (bytes / 8 * 7) as u32
    }

    /// The kernel, loaded.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.function(&source(device.arch())).map(Self)
    }

    /// Enqueues `blocks` blocks, each on a multiprocessor of its own, that stay for so many nanoseconds. `started` is marked
    /// once all have begun.
    ///
    /// # Safety
    /// `starts` is the address of as many words of eight bytes, which live until the kernel has run.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        starts: u64,
        blocks: u32,
        nanoseconds: u32,
        started: Option<&Event>,
    ) -> Result<(), CudaError> {
        let most = self.0.attributes().max_dynamic_shared_bytes;
        let launch = Launch::linear(blocks, THREADS).shared_bytes(Self::shared_bytes(most));
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.0.launch_signalling(stream, &launch, &(starts, nanoseconds), started) }
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("start_litmus", arch)
        .line("#include \"start_litmus.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(
            "start_litmus(u64* starts, u32 nanoseconds) { counterpoint::start_litmus(starts, nanoseconds); }",
        )
}

/// The only one.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let source = source(Arch::SM_90A);
    vec![Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: 255 }]
}
