//! The launcher of `column_max.cuh`: `max_logits` of all ranks from those of each.

use super::{MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 128;

/// The largest element of each column of a few rows of f32, for every GPU: prepared to run many times.
#[derive(Clone, Debug)]
pub struct ColumnMax {
    function: Function,
    rows: u32,
    stride: u32,
    columns: u32,
}

impl ColumnMax {
    /// The kernel, loaded: for `[rows, stride]`, of which the first `columns` columns count.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device, [rows, stride]: [usize; 2], columns: usize) -> Result<Self, CudaError> {
        let function = device.function(&source(device.arch()))?;
        Ok(Self { function, rows: rows as u32, stride: stride as u32, columns: columns as u32 })
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// `src` and `dst` are addresses of `[rows, stride]` and of `[columns]` f32, which do not overlap and live until the kernel has
    /// run.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, src: u64, dst: u64) -> Result<(), CudaError> {
        let Self { rows, stride, columns, .. } = *self;
        let launch = Launch::linear(columns.div_ceil(THREADS), THREADS);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &launch, &(src, dst, rows, stride, columns)) }
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("column_max", arch)
        .line("#include \"column_max.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line("column_max(const float* src, float* dst, u32 rows, u32 stride, u32 columns) {")
        .line("  counterpoint::column_max(src, dst, rows, stride, columns);")
        .line("}")
}

/// The one that there is.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    vec![Specialisation { source: source(arch), matrix_unit: MatrixUnit::None, register_limit: 64 }]
}
