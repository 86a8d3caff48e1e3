//! The launcher of `attention/attention_delta.cuh`: delta and the sink's gradient before an attention backward.

use super::{DeltaTensors, ElementType, MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DeviceBuffer, Function, KernelSource, Launch, Stream};

/// Threads of a block of `attention_delta`.
const THREADS: u32 = 256;
/// Rows of a block.
const ROWS: usize = 64;
/// Most blocks along an axis of a grid but the first.
const MOST_BLOCKS: usize = 65535;

/// `delta = rowsum(dout * out) - dlse` of a backward, and the gradient of its sink, for every GPU: prepared to run many times.
#[derive(Clone, Debug)]
pub struct AttentionDelta {
    delta: Function,
    dsink: Function,
    parts: DeviceBuffer,
    rows: usize,
    heads: usize,
    dim: usize,
    sinks: usize,
}

/// `AttentionDeltaArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionDeltaArguments {
    out: u64,
    dout: u64,
    lse: u64,
    dlse: u64,
    delta: u64,
    sink: u64,
    dsink_parts: u64,
    row_begin: u32,
    rows: u32,
    heads: u32,
    head_dim: u32,
    sinks: u32,
    blocks: u32,
}

/// `AttentionDsinkArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionDsinkArguments {
    parts: u64,
    dsink: u64,
    sinks: u32,
    heads: u32,
    blocks: u32,
    reserved: u32,
}

impl AttentionDelta {
    /// Makes the statistic of tensors `[rows, heads, dim]` ready, with a sink of `seqlen_sink` rows (0 for none); `dim` is a
    /// multiple of 8.
    ///
    /// # Errors
    /// When a kernel cannot be compiled, or memory is short.
    pub fn new(
        setup: &Stream,
        element: ElementType,
        [rows, heads, dim]: [usize; 3],
        seqlen_sink: usize,
    ) -> Result<Self, CudaError> {
        let device = setup.device();
        let arch = device.arch();
        Ok(Self {
            delta: device.function(&delta_source(arch, element))?,
            dsink: device.function(&dsink_source(arch))?,
            // A buffer has at least one byte.
            parts: DeviceBuffer::new(device, (4 * heads * seqlen_sink * rows.div_ceil(ROWS)).max(4))?,
            rows,
            heads,
            dim,
            sinks: seqlen_sink,
        })
    }

    /// Enqueues it. Nothing is allocated and nothing waits.
    ///
    /// # Safety
    /// `tensors` are addresses of what [`DeltaTensors`] says, of the shape given to [`AttentionDelta::new`], which live until the
    /// kernels have run; what is written overlaps nothing else. This value lives as long, and its earlier run has finished or
    /// is before this one on the same stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &DeltaTensors) -> Result<(), CudaError> {
        let blocks = self.rows.div_ceil(ROWS);
        if self.heads == 0 {
            return Ok(());
        }
        for first in (0..blocks).step_by(MOST_BLOCKS) {
            let arguments = AttentionDeltaArguments {
                out: tensors.out,
                dout: tensors.dout,
                lse: tensors.lse,
                dlse: tensors.dlse.unwrap_or(0),
                delta: tensors.delta,
                sink: tensors.sink.map_or(0, |(sink, _)| sink),
                dsink_parts: self.parts.address(),
                row_begin: (first * ROWS) as u32,
                rows: self.rows as u32,
                heads: self.heads as u32,
                head_dim: self.dim as u32,
                sinks: self.sinks as u32,
                blocks: blocks as u32,
            };
            let grid = [self.heads as u32, (blocks - first).min(MOST_BLOCKS) as u32, 1];
            // SAFETY: the arguments are those of the kernel in `delta_source`, a test compares their layouts; the rest is the
            // caller's promise.
            unsafe { self.delta.launch(stream, &Launch::new(grid, [THREADS, 1, 1]), &(arguments,))? };
        }
        let Some((_, dsink)) = tensors.sink.filter(|_| self.sinks > 0) else {
            return Ok(());
        };
        let arguments = AttentionDsinkArguments {
            parts: self.parts.address(),
            dsink,
            sinks: self.sinks as u32,
            heads: self.heads as u32,
            blocks: blocks as u32,
            reserved: 0,
        };
        let launch = Launch::new([self.heads as u32, self.sinks as u32, 1], [32, 1, 1]);
        // SAFETY: likewise.
        unsafe { self.dsink.launch(stream, &launch, &(arguments,)) }
    }
}

fn delta_source(arch: Arch, element: ElementType) -> KernelSource {
    let name = format!("attention_delta_{}", element.name());
    kernel_source(&name, arch)
        .define("ELEMENT_BF16", element.define())
        .line("#include \"attention/attention_delta.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!(
            "static_assert(delta::kThreads == {THREADS} && delta::kRows == {ROWS}, \"launch\");"
        ))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const __grid_constant__ AttentionDeltaArguments arguments) {{"))
        .line("  attention_delta(arguments);")
        .line("}")
}

fn dsink_source(arch: Arch) -> KernelSource {
    kernel_source("attention_dsink", arch)
        .line("#include \"attention/attention_delta.cuh\"")
        .line("extern \"C\" __global__ void __launch_bounds__(32)")
        .line("attention_dsink(const __grid_constant__ counterpoint::AttentionDsinkArguments arguments) {")
        .line("  counterpoint::attention_dsink(arguments);")
        .line("}")
}

/// Every element type.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let sources =
        ElementType::ALL.map(|element| delta_source(arch, element)).into_iter().chain([dsink_source(arch)]);
    sources
        .map(|source| Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: 255 })
        .collect()
}

/// What host and kernels share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!(
            "attention/attention_delta.cuh",
            AttentionDeltaArguments {
                out,
                dout,
                lse,
                dlse,
                delta,
                sink,
                dsink_parts,
                row_begin,
                rows,
                heads,
                head_dim,
                sinks,
                blocks
            }
        ),
        shared_layout!(
            "attention/attention_delta.cuh",
            AttentionDsinkArguments { parts, dsink, sinks, heads, blocks, reserved }
        ),
    ]
}
