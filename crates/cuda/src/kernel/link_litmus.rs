//! The launcher of `link_litmus.cuh`: a message-passing litmus test between two GPUs.

use super::link_barrier::LinkCall;
use super::link_copy::LinkDirection;
use super::{MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 32;

/// Two ranks that send each other messages round after round, and count words that are not of their round: whether the
/// device-side barriers keep what they promise.
#[derive(Debug)]
pub struct LinkLitmus {
    function: Function,
    counts: DeviceBuffer,
}

/// What one rank found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LitmusResult {
    /// Words that were not of their round.
    pub wrong: u64,
    /// Rounds in which the other rank was seen.
    pub rounds: u64,
}

impl LinkLitmus {
    /// Bytes of a message (`kLitmusWords`).
    pub const BYTES: usize = 1024;

    /// The kernel, loaded, and its counts on `stream`, which is waited for.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(stream: &Stream, direction: LinkDirection) -> Result<Self, CudaError> {
        let device: &Device = stream.device();
        let function = device.function(&source(device.arch(), direction))?;
        Ok(Self { function, counts: DeviceBuffer::from_slice(stream, &[0u64; 2])? })
    }

    /// Enqueues the rounds of rank 0 or 1.
    ///
    /// # Safety
    /// `call` has one tensor on either side, of [`LinkLitmus::BYTES`], which lives until both kernels have run, as do the
    /// mailboxes; nothing keeps the other rank's kernel from running at the same time.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        call: &LinkCall,
        rank: u32,
        rounds: u32,
    ) -> Result<(), CudaError> {
        let counts = self.counts.address();
        let arguments = (*call, rank, rounds, counts, counts + 8);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &Launch::linear(1, THREADS), &arguments) }
    }

    /// What was found. Waits for `stream`.
    ///
    /// # Errors
    /// When the kernel failed.
    pub fn result(&self, stream: &Stream) -> Result<LitmusResult, CudaError> {
        let counts = self.counts.download::<u64>(stream, 0, 2)?;
        Ok(LitmusResult { wrong: counts[0], rounds: counts[1] })
    }
}

fn source(arch: Arch, direction: LinkDirection) -> KernelSource {
    let (name, push) = match direction {
        LinkDirection::Pull => ("link_litmus_pull", "false"),
        LinkDirection::Push => ("link_litmus_push", "true"),
    };
    kernel_source(name, arch)
        .line("#include \"link_litmus.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!(
            "{name}(const __grid_constant__ LinkCall call, u32 rank, u32 rounds, u64* wrong, u64* ended) {{"
        ))
        .line(format_args!("  link_litmus<{push}>(call, rank, rounds, wrong, ended);"))
        .line("}")
}

/// Both directions.
pub(super) fn specialisations() -> Vec<Specialisation> {
    [LinkDirection::Pull, LinkDirection::Push]
        .map(|direction| Specialisation {
            source: source(Arch::SM_90A, direction),
            matrix_unit: MatrixUnit::None,
            register_limit: 255,
        })
        .into()
}
