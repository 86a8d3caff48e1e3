//! The launcher of `random_fill.cuh`, and the same numbers on the host.

use half::{bf16, f16};

use super::scalar::Scalar;
use super::{MatrixUnit, Specialisation, blocks_of};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;

/// Fills tensors with numbers that look random, nearly normal with a standard deviation of 1.15, and that the host can compute
/// one by one: inputs of benchmarks and tests that are too large to be sent.
#[derive(Clone, Debug)]
pub struct RandomFill {
    function: Function,
    scalar: Scalar,
}

impl RandomFill {
    /// The kernel for an element type on a device.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device, scalar: Scalar) -> Result<Self, CudaError> {
        Ok(Self { function: device.function(&source(device.arch(), scalar))?, scalar })
    }

    /// Enqueues the filling of all of `buffer`.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn launch(&self, stream: &Stream, buffer: &DeviceBuffer, seed: u64) -> Result<(), CudaError> {
        let count = buffer.len() as u64 / self.scalar.bytes();
        if count == 0 {
            return Ok(());
        }
        let blocks = blocks_of(count.div_ceil(u64::from(THREADS)), stream.device().sm_count());
        // SAFETY: the arguments are those of the kernel in `source`; the buffer has `count` elements, and its memory is freed
        // only after what is enqueued.
        unsafe {
            self.function.launch(stream, &Launch::linear(blocks, THREADS), &(buffer.address(), count, seed))
        }
    }

    /// The element that [`RandomFill::launch`] writes at `index`.
    pub fn value(scalar: Scalar, seed: u64, index: u64) -> f32 {
        let mut x = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        let sum: i32 = (0..4).map(|part| (x >> (16 * part) & 0xffff) as i32).sum();
        let value = (sum - 131_070) as f32 / 32_768.0;
        match scalar {
            Scalar::F32 => value,
            Scalar::Bf16 => bf16::from_f32(value).to_f32(),
            Scalar::F16 => f16::from_f32(value).to_f32(),
        }
    }
}

fn source(arch: Arch, scalar: Scalar) -> KernelSource {
    let name = format!("random_fill_{}", scalar.name());
    kernel_source(&name, arch)
        .line("#include \"random_fill.cuh\"")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!(
            "{name}({}* to, counterpoint::u64 count, counterpoint::u64 seed) {{",
            scalar.cpp()
        ))
        .line("  counterpoint::random_fill(to, count, seed);")
        .line("}")
}

/// Every element type.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let specialisation = |scalar| Specialisation {
        source: source(arch, scalar),
        matrix_unit: MatrixUnit::None,
        register_limit: 64,
    };
    Scalar::ALL.map(specialisation).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_nearly_normal() {
        let values: Vec<f64> = (0..20_000).map(|i| f64::from(RandomFill::value(Scalar::F32, 7, i))).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.03 && (variance.sqrt() - 1.155).abs() < 0.03, "{mean} {variance}");
    }
}
