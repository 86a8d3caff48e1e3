//! The launcher of `bit_check.cuh`: results of the selftest compared where they lie, call after call.

use super::{MatrixUnit, RowsFault, Specialisation, blocks_of};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;

/// Counts words in which tensors differ, on the device, so that nothing waits for the host between two of them.
#[derive(Clone, Debug)]
pub struct BitCheck {
    function: Function,
    unlike: DeviceBuffer,
}

impl BitCheck {
    /// The kernel, loaded, and its count on `stream`, which is waited for.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(stream: &Stream) -> Result<Self, CudaError> {
        let device: &Device = stream.device();
        let function = device.function(&source(device.arch()))?;
        Ok(Self { function, unlike: DeviceBuffer::from_slice(stream, &[0u64])? })
    }

    /// Enqueues the comparison of two buffers of one size, a multiple of 4 bytes.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when their sizes are others; when the driver refuses.
    pub fn compare(&self, stream: &Stream, a: &DeviceBuffer, b: &DeviceBuffer) -> Result<(), CudaError> {
        if a.len() != b.len() || !a.len().is_multiple_of(4) {
            let reason = RowsFault::Words { a: a.len(), b: b.len() }.into();
            return Err(CudaError::Launch { kernel: self.function.name().to_owned(), reason });
        }
        let words = a.len() as u64 / 4;
        let blocks = blocks_of(words.div_ceil(u64::from(THREADS)), stream.device().sm_count());
        let arguments = (a.address(), b.address(), words, self.unlike.address());
        // SAFETY: the arguments are those of the kernel in `source`; the buffers have so many words, and memory is freed only after
        // what is enqueued.
        unsafe { self.function.launch(stream, &Launch::linear(blocks, THREADS), &arguments) }
    }

    /// Words that were unlike so far. Waits for the stream.
    ///
    /// # Errors
    /// That of anything enqueued before.
    pub fn unlike(&self, stream: &Stream) -> Result<u64, CudaError> {
        Ok(self.unlike.download::<u64>(stream, 0, 1)?[0])
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("bit_check", arch)
        .line("#include \"bit_check.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line("bit_check(const u32* a, const u32* b, u64 words, u64* unlike) {")
        .line("  counterpoint::bit_check(a, b, words, unlike);")
        .line("}")
}

/// The one that there is.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: 64 }]
}
