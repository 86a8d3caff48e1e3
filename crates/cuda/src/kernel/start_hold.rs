//! The launcher of `start_hold.cuh`: what holds streams back until all ranks are enqueued.

use std::time::Duration;

use super::{MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

/// A kernel of one thread that does nothing for a while.
#[derive(Debug)]
pub struct StartHold(Function);

impl StartHold {
    /// The kernel, loaded.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.function(&source(device.arch())).map(Self)
    }

    /// Enqueues it, for four seconds at most.
    pub fn launch(&self, stream: &Stream, duration: Duration) -> Result<(), CudaError> {
        let nanoseconds = u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX);
        // SAFETY: the arguments are those of the kernel in `source`, which touches no memory.
        unsafe { self.0.launch(stream, &Launch::linear(1, 1), &(nanoseconds,)) }
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("start_hold", arch)
        .line("#include \"start_hold.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(1)")
        .line("start_hold(u32 nanoseconds) { counterpoint::start_hold(nanoseconds); }")
}

/// The only one.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: 255 }]
}
