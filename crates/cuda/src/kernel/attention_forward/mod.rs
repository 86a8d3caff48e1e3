//! The launcher of `attention/attention_forward.cuh`.

mod shape;
mod source;
mod tables;

use std::f32::consts::LOG2_E;

use shape::ForwardShape;
use source::Scores;
pub(super) use source::specialisations;
use tables::ForwardTiles;
pub use tables::HopperForwardTables;

use super::attention_merge::AttentionMerge;
use super::device_schedule::DeviceSchedule;
use super::link_barrier::LinkArrivals;
use super::{
    ArrivingTensors, AttentionProblem, ForwardMode, ForwardModeEnd, ForwardTarget, ForwardTensors, HeadRows,
    ResultTensors, Scalar, StateTensors,
};
use crate::layout::{SharedLayout, shared_layout};
use crate::{
    CudaError, DeviceBuffer, Function, Launch, LaunchStart, Stream, Swizzle, TensorMap, TensorMapSpec,
};

/// Attention forward on Hopper: a problem prepared to run many times. One run at a time: the queue of tiles is its own.
#[derive(Clone, Debug)]
pub struct AttentionForward {
    function: Function,
    problem: AttentionProblem,
    mode: ForwardMode,
    shape: ForwardShape,
    schedule: DeviceSchedule,
    /// Tiles that need no row that arrives, and the others.
    tiles: [ForwardTiles; 2],
    queue: DeviceBuffer,
    merge: Option<AttentionMerge>,
    launch: Launch,
}

/// `AttentionForwardArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AttentionForwardArguments {
    q_map: TensorMap,
    k_map: TensorMap,
    v_map: TensorMap,
    arriving_k_map: TensorMap,
    arriving_v_map: TensorMap,
    tiles: u64,
    runs: u64,
    bounds: u64,
    out: u64,
    lse: u64,
    sink: u64,
    begin_acc: u64,
    begin_max: u64,
    begin_sum: u64,
    end_acc: u64,
    end_max: u64,
    end_sum: u64,
    partial_out: u64,
    partial_lse: u64,
    max_logits: u64,
    queue: u64,
    arrivals: LinkArrivals,
    ready: ForwardTiles,
    waiting: ForwardTiles,
    heads: u32,
    heads_per_key: u32,
    heads_q: u32,
    head_dim_v: u32,
    sink_rows: u32,
    rows_k: i32,
    own_rows: i32,
    scale_log2: f32,
    softcap_scale: f32,
    softcap_log2: f32,
}

const NO_STATE: StateTensors = StateTensors { acc: 0, row_max: 0, row_sum: 0 };
const NO_RESULT: ResultTensors = ResultTensors { sink: 0, out: 0, lse: 0 };

impl AttentionForward {
    /// Makes a problem ready by its tables: compiles or finds the kernel, and uploads them by `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or memory is short.
    pub fn new(
        stream: &Stream,
        problem: &AttentionProblem,
        mode: ForwardMode,
        tables: &HopperForwardTables,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let HopperForwardTables { shape, schedule, tiles, workers } = tables;
        let function = device.function(&tables.choice(problem, mode).source())?;

        let merge = match mode.end {
            ForwardModeEnd::Result { seqlen_sink } => {
                let element = problem.element.scalar();
                Some(AttentionMerge::new(
                    stream,
                    problem,
                    schedule,
                    (shape.tokens(), seqlen_sink as u32),
                    element,
                )?)
            }
            ForwardModeEnd::Partial => {
                Some(AttentionMerge::new(stream, problem, schedule, (shape.tokens(), 0), Scalar::F32)?)
            }
            ForwardModeEnd::State => None,
        };
        let queue = DeviceBuffer::from_slice(stream, &[0u32; 3])?;
        let schedule = DeviceSchedule::new(stream, schedule)?;
        let items = schedule.tile_count() * (problem.heads_q as u32 / shape.pack);
        let ctas = items.min((workers / shape.ctas).max(1)) * shape.ctas;
        let launch = Launch::linear(ctas, shape.threads())
            .cluster([shape.ctas, 1, 1])
            .shared_bytes(shape.shared_bytes())
            .start(LaunchStart::Overlapping);
        let (problem, shape, tiles) = (problem.clone(), *shape, *tiles);
        Ok(Self { function, problem, mode, shape, schedule, tiles, queue, merge, launch })
    }

    /// What `row_max` of a state is multiplied by to be that of base 2.
    pub fn max_scale(&self) -> f32 {
        match Scores::of(&self.problem) {
            Scores::Scaled => self.problem.scale * LOG2_E,
            Scores::Transformed => 1.0,
        }
    }

    /// Enqueues the forward. Nothing is allocated, and nothing waits but for rows that arrive.
    ///
    /// # Safety
    /// What sends rows that arrive has started when the kernel does, or else needs none of its multiprocessors. `tensors` are addresses of what [`ForwardTensors`] says, for this value's problem and mode, which live until the kernel
    /// has run; what is written overlaps nothing else, except that a state may be the one begun from. This value lives as
    /// long, and its earlier run has finished or is before this one on the same stream.
    ///
    /// # Errors
    /// [`CudaError::TensorMap`] for an address that is no multiple of 16, or the driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), CudaError> {
        if self.schedule.tile_count() == 0 {
            return Ok(());
        }
        let (result, end) = match tensors.end {
            ForwardTarget::Result(result) => (result, NO_STATE),
            ForwardTarget::State(state) => (NO_RESULT, state),
        };
        let arguments = self.arguments(tensors, &result, &end)?;
        // SAFETY: the arguments are those of the kernel in `ForwardChoice::source`, a test compares their layouts; the rest is
        // the caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(arguments,))? };
        match &self.merge {
            // SAFETY: the caller's promise.
            Some(merge) => unsafe { merge.launch(stream, &result) },
            None => Ok(()),
        }
    }

    fn arguments(
        &self,
        tensors: &ForwardTensors,
        result: &ResultTensors,
        end: &StateTensors,
    ) -> Result<AttentionForwardArguments, CudaError> {
        // Bound once for all tensor maps.
        let _bound = self.function.device().make_current()?;
        let Self { problem, shape, .. } = self;
        let element = problem.element.tensor_map_element();
        let map = |name: &str, tensor: HeadRows, dim, heads, rows: usize, box_heads, box_rows| {
            let dims = [dim as u64, heads as u64, rows as u64];
            let spec = TensorMapSpec::new(element, tensor.address, dims, [64, box_heads, box_rows]);
            tensor.map(spec).swizzle(Swizzle::Span128).encode(self.function.device(), name)
        };
        let AttentionProblem { heads_q, heads_kv, head_dim, head_dim_v, rows_k, rows_arriving, .. } =
            *problem;
        let own_rows = rows_k - rows_arriving;
        // No tensor of the copy engine is empty. Without keys nothing is read, and any address will do.
        let keys = |name: &str, tensor: HeadRows, dim, rows: usize| {
            let tensor = if rows == 0 { tensors.q.address.into() } else { tensor };
            map(name, tensor, dim, heads_kv, rows.max(1), 1, shape.block / shape.ctas)
        };
        let arriving = ArrivingTensors::of(tensors.arriving, rows_arriving)?;
        let [tiles, runs, bounds] = self.schedule.addresses();
        let begin = tensors.begin.unwrap_or(NO_STATE);
        let [partial_out, partial_lse] = self.merge.as_ref().map_or([0; 2], AttentionMerge::partials);
        let sink_rows = match self.mode.end {
            // Split tiles meet their sinks when they are merged; the kernel gives them to whole ones.
            ForwardModeEnd::Result { seqlen_sink } => seqlen_sink as u32,
            ForwardModeEnd::State | ForwardModeEnd::Partial => 0,
        };
        let heads = heads_q as u32 / shape.pack;
        Ok(AttentionForwardArguments {
            q_map: map("q", tensors.q, head_dim, heads_q, problem.rows_q, shape.pack, 64 / shape.pack)?,
            k_map: keys("k", tensors.k, head_dim, own_rows)?,
            v_map: keys("v", tensors.v, head_dim_v, own_rows)?,
            arriving_k_map: keys("arriving k", arriving.k.into(), head_dim, rows_arriving)?,
            arriving_v_map: keys("arriving v", arriving.v.into(), head_dim_v, rows_arriving)?,
            tiles,
            runs,
            bounds,
            out: result.out,
            lse: result.lse,
            sink: result.sink,
            begin_acc: begin.acc,
            begin_max: begin.row_max,
            begin_sum: begin.row_sum,
            end_acc: end.acc,
            end_max: end.row_max,
            end_sum: end.row_sum,
            partial_out,
            partial_lse,
            max_logits: tensors.largest(&self.mode, self.function.name())?,
            queue: self.queue.address(),
            arrivals: arriving.arrivals.after(own_rows, rows_arriving),
            ready: self.tiles[0],
            waiting: self.tiles[1],
            heads,
            heads_per_key: heads / heads_kv as u32,
            heads_q: heads_q as u32,
            head_dim_v: head_dim_v as u32,
            sink_rows,
            rows_k: rows_k.max(1) as i32,
            own_rows: if rows_arriving == 0 { i32::MAX } else { own_rows as i32 },
            scale_log2: problem.scale * LOG2_E,
            softcap_scale: problem.softcap.map_or(0.0, |softcap| 2.0 * problem.scale * LOG2_E / softcap),
            softcap_log2: problem.softcap.map_or(0.0, |softcap| softcap * LOG2_E),
        })
    }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    let tiles = shared_layout!(
        "attention/attention_forward.cuh",
        ForwardTiles { first, count, grouped, heads_per_group }
    );
    let arguments = shared_layout!(
        "attention/attention_forward.cuh",
        AttentionForwardArguments {
            q_map,
            k_map,
            v_map,
            arriving_k_map,
            arriving_v_map,
            tiles,
            runs,
            bounds,
            out,
            lse,
            sink,
            begin_acc,
            begin_max,
            begin_sum,
            end_acc,
            end_max,
            end_sum,
            partial_out,
            partial_lse,
            max_logits,
            queue,
            arrivals,
            ready,
            waiting,
            heads,
            heads_per_key,
            heads_q,
            head_dim_v,
            sink_rows,
            rows_k,
            own_rows,
            scale_log2,
            softcap_scale,
            softcap_log2,
        }
    );
    vec![tiles, arguments]
}
