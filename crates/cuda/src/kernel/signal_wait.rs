use std::time::Duration;

use bytemuck::{AnyBitPattern, NoUninit, Zeroable};

use super::layout::{SharedLayout, shared_layout};
use super::{MatrixUnit, Specialisation};
use crate::arch::Arch;
use crate::memory::PinnedBuffer;
use crate::{CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

/// Registers that a multiprocessor has left for each thread of one warp beside a product, which holds 63 Ki of 64 Ki of them: with
/// more, the wait would not start before the product's last tiles.
const REGISTERS: u32 = 32;

/// Launches waits of streams for counters that kernels of other streams raise while they run.
#[derive(Clone, Debug)]
pub struct SignalWait(Function);

/// What several waits keep from run to run.
#[derive(Clone, Debug)]
pub struct SignalWaits {
    waited: DeviceBuffer,
    faults: PinnedBuffer,
}

/// A wait that gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissedSignal {
    /// What the counter was at.
    pub seen: u64,
    /// What it should have come to.
    pub wanted: u64,
}

/// `SignalFault` of the kernel.
#[derive(Clone, Copy, Debug, AnyBitPattern, NoUninit)]
#[repr(C)]
struct SignalFault {
    set: u64,
    seen: u64,
    wanted: u64,
}

impl SignalWaits {
    /// So many waits have room in it.
    pub const COUNT: usize = 64;

    /// None of them has seen anything yet. Waits for `setup`.
    ///
    /// # Errors
    /// When memory is used up.
    pub fn new(setup: &Stream) -> Result<Self, CudaError> {
        Ok(Self {
            waited: DeviceBuffer::from_slice(setup, &[0u32; Self::COUNT])?,
            faults: PinnedBuffer::new(setup.device(), Self::COUNT * size_of::<SignalFault>())?,
        })
    }

    /// Whether wait `index` has given up.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] when there is none of this index.
    pub fn missed(&self, index: usize) -> Result<Option<MissedSignal>, CudaError> {
        let mut found = [SignalFault::zeroed()];
        self.faults.read(index * size_of::<SignalFault>(), &mut found)?;
        let [SignalFault { set, seen, wanted }] = found;
        Ok((set != 0).then_some(MissedSignal { seen, wanted }))
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
    /// enqueued, or since it was 0. It lasts `limit` at most.
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
        limit: Duration,
    ) -> Result<(), CudaError> {
        let waited = waits.waited.slice(index * size_of::<u32>()..(index + 1) * size_of::<u32>())?.address();
        let fault = waits.faults.device_address() + (index * size_of::<SignalFault>()) as u64;
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.0.launch(stream, &Launch::linear(1, 1), &(counter, waited, rise, limit, fault)) }
    }
}

fn source(arch: Arch) -> KernelSource {
    KernelSource::new("signal_wait", arch)
        .line("#include \"signal_wait.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(1)")
        .line("signal_wait(const u32* counter, u32* waited, u32 rise, u64 limit, SignalFault* fault) {")
        .line("  counterpoint::signal_wait(counter, waited, rise, limit, fault);")
        .line("}")
}

/// The only one.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: REGISTERS }]
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!("signal_wait.cuh", SignalFault { set, seen, wanted })]
}
