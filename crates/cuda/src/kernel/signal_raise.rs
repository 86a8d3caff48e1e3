//! The launcher of `signal_raise.cuh`: streams that say to a running kernel how far they have come.

use super::{MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch};
use crate::{DeviceBuffer, Stream};

/// As of a wait for a kernel: with more it would not start while a product runs.
const REGISTERS: u32 = 32;

/// Raises words that kernels of other streams wait for.
#[derive(Clone, Debug)]
pub struct SignalRaise(Function);

impl SignalRaise {
    /// The kernel, loaded.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.function(&source(device.arch())).map(Self)
    }

    /// Has the word of this number among `words`, u32 each, be one more once all that was enqueued on `stream` before is done.
    ///
    /// # Safety
    /// `words` live until that.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when the number is too large; when the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        words: &DeviceBuffer,
        number: usize,
    ) -> Result<(), CudaError> {
        let word = words.slice(number * size_of::<u32>()..(number + 1) * size_of::<u32>())?.address();
        // SAFETY: the argument is that of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.0.launch(stream, &Launch::linear(1, 1), &(word,)) }
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("signal_raise", arch)
        .line("#include \"signal_raise.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(1)")
        .line("signal_raise(u32* word) { counterpoint::signal_raise(word); }")
}

/// The only one.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: REGISTERS }]
}
