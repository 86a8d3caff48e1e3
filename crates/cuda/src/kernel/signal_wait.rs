//! The launcher of `signal_wait.cuh`: streams that wait for a running GEMM's tile counters.

use super::{MatrixUnit, Specialisation, WaitLimit};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

/// Registers that a multiprocessor has left for each thread of one warp besides a product, which holds 63 Ki of 64 Ki of them: with
/// more, the wait would not start before the product's last tiles.
const REGISTERS: u32 = 32;

/// Launches waits of streams for counters that kernels of other streams raise while they run.
#[derive(Clone, Debug)]
pub struct SignalWait(Function);

/// What several waits keep from run to run.
#[derive(Clone, Debug)]
pub struct SignalWaits {
    waited: DeviceBuffer,
}

impl SignalWaits {
    /// So many waits have room in it.
    pub const COUNT: usize = 64;

    /// None of them has seen anything yet. Waits for `setup`.
    ///
    /// # Errors
    /// When memory is used up.
    pub fn new(setup: &Stream) -> Result<Self, CudaError> {
        Ok(Self { waited: DeviceBuffer::from_slice(setup, &[0u32; Self::COUNT])? })
    }
}

impl SignalWait {
    /// The kernel, loaded.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.function(&source(device.arch())).map(Self)
    }

    /// Has what is enqueued on `stream` from now on start once the counter has risen by `rise` more than when wait `index` was last
    /// enqueued, or since it was 0, or `limit` ends the wait.
    ///
    /// # Safety
    /// `counter` is the address of a u32 that was 0 when `waits` were made and only grows, by `rise` for every time that this wait
    /// is enqueued. What raises it is enqueued before the wait, and on the same GPU. All three live until the wait has ended.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when there is no wait of this index; when the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        waits: &SignalWaits,
        index: usize,
        counter: u64,
        rise: u32,
        limit: WaitLimit,
    ) -> Result<(), CudaError> {
        let waited = waits.waited.slice(index * size_of::<u32>()..(index + 1) * size_of::<u32>())?.address();
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.0.launch(stream, &Launch::linear(1, 1), &(counter, waited, rise, limit)) }
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("signal_wait", arch)
        .line("#include \"signal_wait.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(1)")
        .line("signal_wait(const u32* counter, u32* waited, u32 rise, WaitLimit limit) {")
        .line("  counterpoint::signal_wait(counter, waited, rise, limit);")
        .line("}")
}

/// The only one.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: REGISTERS }]
}
