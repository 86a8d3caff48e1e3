//! The launcher of `attention/attention_finish.cuh`: partial results of rows that other ranks merge, and results of merged ones.

use super::scalar::Scalar;
use super::{MatrixUnit, ResultTensors, Specialisation, StateTensors, blocks_of};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

/// Threads of a block (`kFinishThreads`); a warp ends one head of a row.
const THREADS: u32 = 256;

/// Ends rows of an online softmax outside of the forward, for every GPU: a state becomes a partial result of its rows, merged ones
/// become results with their sink. Statistics, partial results and what is read are f32.
#[derive(Clone, Debug)]
pub struct AttentionFinish {
    function: Function,
    heads: u32,
    head_dim_v: u32,
    sm_count: u32,
}

/// `AttentionFinishArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionFinishArguments {
    acc: u64,
    row_max: u64,
    row_sum: u64,
    sink: u64,
    out: u64,
    lse: u64,
    entries: u64,
    heads_q: u32,
    head_dim_v: u32,
    sink_rows: u32,
    max_scale: f32,
}

impl AttentionFinish {
    /// The kernel for rows of `heads` heads of `head_dim_v` elements that become elements of type `out`.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(device: &Device, out: Scalar, heads: usize, head_dim_v: usize) -> Result<Self, CudaError> {
        Ok(Self {
            function: device.function(&source(device.arch(), out))?,
            heads: heads as u32,
            head_dim_v: head_dim_v as u32,
            sm_count: device.sm_count(),
        })
    }

    /// Enqueues the end of `rows` rows of a state, whose `row_max` is that of base 2 once multiplied by `max_scale`. Results
    /// have no sink here and may lie where `acc` and `row_max` do.
    ///
    /// # Safety
    /// `state` and `partial` are addresses of tensors of so many rows, `partial.out` of the type given to [`AttentionFinish::new`],
    /// which live until the kernel has run and overlap in no other way.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn partial(
        &self,
        stream: &Stream,
        rows: usize,
        state: &StateTensors,
        max_scale: f32,
        partial: &ResultTensors,
    ) -> Result<(), CudaError> {
        let StateTensors { acc, row_max, row_sum } = *state;
        let ResultTensors { out, lse, .. } = *partial;
        let arguments =
            AttentionFinishArguments { acc, row_max, row_sum, out, lse, max_scale, ..self.arguments(rows) };
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, arguments) }
    }

    /// Enqueues the end of `rows` rows whose merged partial results are `out` and `lse` of `merged`, and whose sink has `sink_rows` rows.
    ///
    /// # Safety
    /// As [`AttentionFinish::partial`]; the sink of `result` is the address of `[sink_rows, heads]`.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn result(
        &self,
        stream: &Stream,
        rows: usize,
        merged: &ResultTensors,
        sink_rows: usize,
        result: &ResultTensors,
    ) -> Result<(), CudaError> {
        let ResultTensors { sink, out, lse } = *result;
        let (acc, row_max) = (merged.out, merged.lse);
        let (sink_rows, max_scale) = (sink_rows as u32, std::f32::consts::LOG2_E);
        let arguments = AttentionFinishArguments {
            acc,
            row_max,
            sink,
            out,
            lse,
            sink_rows,
            max_scale,
            ..self.arguments(rows)
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, arguments) }
    }

    /// Enqueues the copy of `rows` rows at `from` to `to`, converted and nothing else.
    ///
    /// # Safety
    /// Both are addresses of so many rows, which live until the kernel has run and do not overlap.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn copy(&self, stream: &Stream, rows: usize, from: u64, to: u64) -> Result<(), CudaError> {
        let arguments = AttentionFinishArguments { acc: from, out: to, ..self.arguments(rows) };
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, arguments) }
    }

    fn arguments(&self, rows: usize) -> AttentionFinishArguments {
        AttentionFinishArguments {
            acc: 0,
            row_max: 0,
            row_sum: 0,
            sink: 0,
            out: 0,
            lse: 0,
            entries: rows as u64 * u64::from(self.heads),
            heads_q: self.heads,
            head_dim_v: self.head_dim_v,
            sink_rows: 0,
            max_scale: 1.0,
        }
    }

    /// # Safety
    /// The addresses are those of tensors of so many entries.
    unsafe fn launch(&self, stream: &Stream, arguments: AttentionFinishArguments) -> Result<(), CudaError> {
        if arguments.entries == 0 {
            return Ok(());
        }
        let blocks = blocks_of(arguments.entries.div_ceil(u64::from(THREADS / 32)), self.sm_count);
        // SAFETY: the arguments are those of the kernel in `source`, a test compares their layouts; the rest is the caller's
        // promise.
        unsafe { self.function.launch(stream, &Launch::linear(blocks, THREADS), &(arguments,)) }
    }
}

fn source(arch: Arch, out: Scalar) -> KernelSource {
    let name = format!("attention_finish_{}", out.name());
    kernel_source(&name, arch)
        .line("#include \"attention/attention_finish.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("static_assert(kFinishThreads == {THREADS}, \"launch\");"))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const __grid_constant__ AttentionFinishArguments arguments) {{"))
        .line(format_args!("  attention_finish<{}>(arguments);", out.cpp()))
        .line("}")
}

/// Every type of results.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let specialisation =
        |out| Specialisation { source: source(arch, out), matrix_unit: MatrixUnit::None, register_limit: 64 };
    Scalar::ALL.map(specialisation).to_vec()
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "attention/attention_finish.cuh",
        AttentionFinishArguments {
            acc,
            row_max,
            row_sum,
            sink,
            out,
            lse,
            entries,
            heads_q,
            head_dim_v,
            sink_rows,
            max_scale,
        }
    )]
}
