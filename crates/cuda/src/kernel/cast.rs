//! The launcher of `cast.cuh`: conversions between f32, bf16 and f16.

use super::scalar::Scalar;
use super::{MatrixUnit, Specialisation, blocks_of};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;
/// Elements that a thread converts at a time (`kCastPack` times `kCastUnroll`).
const PACK: u64 = 16;

/// A tensor in another element type, every value rounded once, to nearest even.
#[derive(Clone, Debug)]
pub struct Cast {
    function: Function,
    sm_count: u32,
}

impl Cast {
    /// The kernel for these two types on a device.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device, src: Scalar, dst: Scalar) -> Result<Self, CudaError> {
        Ok(Self { function: device.function(&source(device.arch(), src, dst))?, sm_count: device.sm_count() })
    }

    /// Enqueues the conversion of `count` elements.
    ///
    /// # Safety
    /// `src` and `dst` are addresses of `count` elements of the two types each, aligned to 16 bytes, which do not overlap and
    /// live until the kernel has run.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, src: u64, dst: u64, count: u64) -> Result<(), CudaError> {
        if count == 0 {
            return Ok(());
        }
        let blocks = blocks_of(count.div_ceil(PACK).div_ceil(u64::from(THREADS)), self.sm_count);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &Launch::linear(blocks, THREADS), &(src, dst, count)) }
    }
}

fn source(arch: Arch, src: Scalar, dst: Scalar) -> KernelSource {
    let name = format!("cast_{}_{}", src.name(), dst.name());
    let (src, dst) = (src.cpp(), dst.cpp());
    kernel_source(&name, arch)
        .line("#include \"cast.cuh\"")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const {src}* src, {dst}* dst, counterpoint::u64 count) {{"))
        .line("  counterpoint::cast(src, dst, count);")
        .line("}")
}

/// Every pair of different types.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let pairs = Scalar::ALL.into_iter().flat_map(|src| Scalar::ALL.into_iter().map(move |dst| (src, dst)));
    pairs
        .filter(|(src, dst)| src != dst)
        .map(|(src, dst)| Specialisation {
            source: source(arch, src, dst),
            matrix_unit: MatrixUnit::None,
            register_limit: 64,
        })
        .collect()
}
