//! The launcher of `attention/attention_merge.cuh`: parts of a forward's rows put together, as split-KV decoding does.

use counterpoint_tiles::{TileMerge, TileSchedule};

use super::{AttentionProblem, ElementType, MatrixUnit, ResultTensors, Scalar, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;

/// What a launch is given that merges nothing.
const NO_ROWS: TileMerge = TileMerge { start: 0, end: 0, slot_begin: 0, slot_end: 0 };

/// The partial results of the split tiles of one schedule, and the kernel that merges them.
#[derive(Clone, Debug)]
pub(super) struct AttentionMerge {
    function: Function,
    merges: DeviceBuffer,
    /// Whether no tile is split.
    is_idle: bool,
    partial_out: DeviceBuffer,
    partial_lse: DeviceBuffer,
    launch: Launch,
    arguments: AttentionMergeArguments,
}

/// `AttentionMergeArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionMergeArguments {
    merges: u64,
    partial_out: u64,
    partial_lse: u64,
    out: u64,
    lse: u64,
    sink: u64,
    tile_tokens: u32,
    heads_q: u32,
    head_dim_v: u32,
    sink_rows: u32,
}

impl AttentionMerge {
    /// Memory for the partial results of `schedule`, whose tiles own up to `tile_tokens` tokens. What they are merged into has elements of
    /// type `result`: those of the problem, or f32.
    ///
    /// # Errors
    /// When memory is short or the kernel cannot be compiled.
    pub(super) fn new(
        stream: &Stream,
        problem: &AttentionProblem,
        schedule: &TileSchedule,
        (tile_tokens, sink_rows): (u32, u32),
        result: Scalar,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let rows = schedule.partials() * tile_tokens as usize * problem.heads_q;
        let is_idle = schedule.merges().is_empty();
        let merges = if is_idle { &[NO_ROWS][..] } else { schedule.merges() };
        let merges = DeviceBuffer::from_slice(stream, merges)?;
        // No buffer is empty.
        let partial_out = DeviceBuffer::new(device, (rows * problem.head_dim_v * size_of::<f32>()).max(1))?;
        let partial_lse = DeviceBuffer::new(device, (rows * size_of::<f32>()).max(1))?;
        let arguments = AttentionMergeArguments {
            merges: 0,
            partial_out: partial_out.address(),
            partial_lse: partial_lse.address(),
            out: 0,
            lse: 0,
            sink: 0,
            tile_tokens,
            heads_q: problem.heads_q as u32,
            head_dim_v: problem.head_dim_v as u32,
            sink_rows,
        };
        // A thread for each piece of 8 columns: whoever waits for this kernel waits for the way to memory and back.
        let pieces = tile_tokens * problem.head_dim_v as u32 / 8;
        let grid = match schedule.merges().len() {
            0 => [1; 3],
            merges => [merges as u32, problem.heads_q as u32, pieces.div_ceil(THREADS)],
        };
        let launch = Launch::new(grid, [THREADS, 1, 1]);
        let function = device.function(&source(device.arch(), problem.element, result))?;
        Ok(Self { function, merges, is_idle, partial_out, partial_lse, launch, arguments })
    }

    /// Addresses of the slots' results and logarithms.
    pub(super) fn partials(&self) -> [u64; 2] {
        [self.partial_out.address(), self.partial_lse.address()]
    }

    /// Enqueues the merge into the rows of split tiles. Where there are none, a graph that is captured gets a launch that does nothing: it
    /// may be updated to a mask that has some.
    ///
    /// # Safety
    /// As the launch of the forward that wrote the partial results.
    ///
    /// # Errors
    /// When the driver refuses.
    pub(super) unsafe fn launch(&self, stream: &Stream, result: &ResultTensors) -> Result<(), CudaError> {
        if self.is_idle && !stream.is_capturing()? {
            return Ok(());
        }
        let ResultTensors { sink, out, lse } = *result;
        let arguments =
            AttentionMergeArguments { merges: self.merges.address(), sink, out, lse, ..self.arguments };
        // SAFETY: the arguments are those of the kernel in `source`, a test compares their layouts; slots and list live as
        // long as this value; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(arguments,)) }
    }
}

fn source(arch: Arch, element: ElementType, result: Scalar) -> KernelSource {
    // Partial results have no element type.
    let element = if result == Scalar::F32 { ElementType::Bf16 } else { element };
    let name = format!("attention_merge_{}", result.name());
    let result = if result == Scalar::F32 { "float" } else { "Element" };
    kernel_source(&name, arch)
        .define("ELEMENT_BF16", element.define())
        .line("#include \"attention/attention_merge.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!(
            "{name}(const __grid_constant__ counterpoint::AttentionMergeArguments arguments) {{"
        ))
        .line(format_args!("  attention_merge<{result}>(arguments);"))
        .line("}")
}

/// Both element types, and partial results.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let specialisation = |(element, result)| Specialisation {
        source: source(arch, element, result),
        matrix_unit: MatrixUnit::None,
        register_limit: 255,
    };
    let results = ElementType::ALL.map(|element| (element, element.scalar()));
    results.into_iter().chain([(ElementType::Bf16, Scalar::F32)]).map(specialisation).collect()
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "attention/attention_merge.cuh",
        AttentionMergeArguments {
            merges,
            partial_out,
            partial_lse,
            out,
            lse,
            sink,
            tile_tokens,
            heads_q,
            head_dim_v,
            sink_rows,
        }
    )]
}
