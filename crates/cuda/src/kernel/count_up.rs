//! The launcher of `count_up.cuh`: one more in a word on the device, in the order of a stream.

use super::{MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

/// A kernel of one thread.
#[derive(Debug)]
pub struct CountUp(Function);

impl CountUp {
    /// The kernel, loaded.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.function(&source(device.arch())).map(Self)
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// `word` is the address of a u32 that lives until the kernel has run and that nobody else touches meanwhile.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, word: u64) -> Result<(), CudaError> {
        // SAFETY: the argument is that of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.0.launch(stream, &Launch::linear(1, 1), &(word,)) }
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("count_up", arch)
        .line("#include \"count_up.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(1)")
        .line("count_up(u32* word) { counterpoint::count_up(word); }")
}

/// The only one.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: 255 }]
}
