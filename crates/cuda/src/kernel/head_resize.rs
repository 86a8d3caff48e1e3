//! The launcher of `head_resize.cuh`: padded copies of heads, and copies back without the padding.

use super::{MatrixUnit, Specialisation, blocks_of};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;

/// Heads of another number of elements: longer ones end in zeros, shorter ones lose their end. Kernels of attention take
/// rows of heads whose length is a multiple of 8; other lengths go through padded copies.
#[derive(Clone, Debug)]
pub struct HeadResize {
    function: Function,
    sm_count: u32,
}

impl HeadResize {
    /// The kernel for elements of `bytes` (2 or 4) bytes on a device.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device, bytes: u64) -> Result<Self, CudaError> {
        Ok(Self { function: device.function(&source(device.arch(), bytes))?, sm_count: device.sm_count() })
    }

    /// Enqueues the copy of `heads` heads of `from` elements to heads of `to`.
    ///
    /// # Safety
    /// `src` and `dst` are addresses of that many elements of the kernel's size, which do not overlap and live until the
    /// kernel has run.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        src: u64,
        dst: u64,
        heads: u64,
        (from, to): (u32, u32),
    ) -> Result<(), CudaError> {
        if heads == 0 || to == 0 {
            return Ok(());
        }
        let blocks = blocks_of((heads * u64::from(to)).div_ceil(u64::from(THREADS)), self.sm_count);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe {
            self.function.launch(stream, &Launch::linear(blocks, THREADS), &(src, dst, heads, from, to))
        }
    }
}

fn source(arch: Arch, bytes: u64) -> KernelSource {
    let name = format!("head_resize_{bytes}");
    let word = if bytes == 2 { "counterpoint::u16" } else { "counterpoint::u32" };
    kernel_source(&name, arch)
        .line("#include \"head_resize.cuh\"")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!(
            "{name}(const {word}* src, {word}* dst, counterpoint::u64 heads, counterpoint::u32 from,"
        ))
        .line("    counterpoint::u32 to) {")
        .line("  counterpoint::head_resize(src, dst, heads, from, to);")
        .line("}")
}

/// Both element sizes.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let specialisation = |bytes| Specialisation {
        source: source(arch, bytes),
        matrix_unit: MatrixUnit::None,
        register_limit: 64,
    };
    [2, 4].map(specialisation).to_vec()
}
