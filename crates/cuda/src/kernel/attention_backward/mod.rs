//! The launcher of `attention/attention_backward.cuh` and, for long heads, `attention/attention_backward_pair.cuh`.

mod arguments;
mod scheduler;
mod scratch;
mod shape;
mod source;
mod tables;

use std::f32::consts::LOG2_E;

pub(super) use arguments::layouts;
use arguments::{
    AttentionBackwardArguments, AttentionBackwardRowsArguments, BackwardAlone, BackwardClasses,
    BackwardDqOrder, BackwardHalfHeads, BackwardOrder, BackwardParams, BackwardRounding,
};
use counterpoint_mask::Range;
use counterpoint_tiles::{Tile, TileClasses};
use scheduler::{missed, rows_launch};
use scratch::{DqOrderTables, Sums};
use shape::{CLASSES, shape_of};
pub(super) use source::specialisations;
use source::{BackwardChoice, rows_source};
pub use tables::HopperBackwardTables;

use super::device_schedule::DeviceSchedule;
use super::{
    ArrivingTensors, AttentionProblem, BackwardMode, BackwardTensors, CtaWaits, DqBegin, DqRounding,
    HeadRows, WaitLimit,
};
use crate::{
    CudaError, DeviceBuffer, Function, Launch, LaunchFault, Stream, Swizzle, TensorMapElement, TensorMapSpec,
};

/// Words before those of the key heads in the queue's buffer.
const QUEUE_WORDS: usize = 2;
/// Warps of a CTA that hold dk and dv of keys.
const KEY_WARPS: usize = 8;
/// Statistics of a row: two, in four copies.
const STATISTICS: usize = 8;
/// Words by which all slabs are rounded.
const ROUNDING: usize = 2;

/// Attention backward on Hopper: a problem prepared to run many times. One run at a time: the queue of tiles is its own.
#[derive(Clone, Debug)]
pub struct AttentionBackward {
    function: Function,
    rows_function: Function,
    problem: AttentionProblem,
    mode: BackwardMode,
    choice: BackwardChoice,
    schedule: DeviceSchedule,
    /// Two words of the queue, and how far each key head is.
    queue: DeviceBuffer,
    statistics: DeviceBuffer,
    /// Rows that all tiles add to each slab of `choice.shape.rows` rows of dq.
    coverage: DeviceBuffer,
    /// Slabs that some tile adds to, of all query heads.
    rounds: u32,
    /// See [`rounds_overlapped`].
    rounds_overlapped: u32,
    /// How much of the list of slabs that are summed somebody rounds, and how long it is; of each slab and query head, how many
    /// rows were added; that list; and of each counter of the order and query head, how many tiles have added.
    progress: DeviceBuffer,
    dq_order: Option<DqOrderTables>,
    /// Where CTAs wait for each other.
    waits: Option<CtaWaits>,
    classes: TileClasses,
    /// How many items the queue has.
    items: u32,
    /// Keys of each tile, in the queue's order.
    tile_keys: Vec<Range>,
    /// Of each tile, whether its dk and dv go rounded to where results are: see [`AttentionBackward::round_alone`].
    alone: Option<DeviceBuffer>,
    /// A word for each warp that has keys of a tile that is split by half-heads, where the kernel has such.
    half_heads: Option<DeviceBuffer>,
    /// Where items are parts of a tile's query heads.
    sums: Option<Sums>,
    /// See [`blocks_per_head`].
    blocks_per_head: u32,
    /// See [`heads_at_a_time`].
    heads_at_a_time: u32,
    launch: Launch,
    rows_launch: Launch,
    /// Whether the pass before sets dq to zero.
    clears: bool,
    /// Whether whoever rounds dq sets its sums to zero, with which the next launch begins.
    zeroes_sums: bool,
    /// After the kernel for long heads, which does not round dq itself.
    dq_rounding: Option<DqRounding>,
}

impl AttentionBackward {
    /// Whether the kernel takes the problem's heads.
    pub fn takes(problem: &AttentionProblem) -> bool {
        shape_of(problem).is_some()
    }

    /// Makes a problem ready by its tables: compiles or finds the kernels, and uploads them by `stream`, which is waited for.
    ///
    /// # Errors
    /// When a kernel cannot be compiled, or memory is short.
    pub fn new(
        stream: &Stream,
        problem: &AttentionProblem,
        mode: BackwardMode,
        tables: &HopperBackwardTables,
    ) -> Result<Self, CudaError> {
        let AttentionProblem { rows_q, heads_q, heads_kv, .. } = *problem;
        let device = stream.device();
        let HopperBackwardTables { heads, schedule, coverage, scheduler, .. } = tables;
        let choice = tables.choice(problem, mode)?;
        let mut functions = device.functions(&[choice.source(), rows_source(problem.element)])?.into_iter();
        let (Some(function), Some(rows_function)) = (functions.next(), functions.next()) else {
            let kernel = "attention_backward".to_owned();
            return Err(CudaError::Launch { kernel, reason: LaunchFault::NotLoaded.into() });
        };

        let dq_order = tables.dq_order.as_ref().map(|order| DqOrderTables::new(stream, order)).transpose()?;
        let counters = dq_order.as_ref().map_or(0, |order| order.counters);
        let queue = DeviceBuffer::from_slice(stream, &vec![0u32; QUEUE_WORDS + heads_q])?;
        let statistics =
            DeviceBuffer::new(device, (4 * STATISTICS * statistic_pitch(rows_q) * heads_q).max(4))?;
        let workers = device.sm_count().saturating_sub(problem.sm_margin).max(1);
        let halved_tiles = scheduler.classes.halved_tiles() as usize;
        // No buffer is empty.
        let half_words = (halved_tiles * heads_kv * KEY_WARPS).max(1);
        let half_heads =
            choice.half_heads().then(|| DeviceBuffer::from_slice(stream, &vec![0_u32; half_words]));
        let sums =
            choice.sums().then(|| Sums::new(stream, problem, schedule.tiles().len(), heads.parts as u32));
        let missed = missed(dq_order.is_some(), halved_tiles, mode);
        let keys = |tile: &Tile| Range::new(tile.start as usize, tile.end as usize);
        let dq_rounding = if choice.rounds_dq() { None } else { DqRounding::new(stream, problem, mode)? };
        let zeroes_sums = mode.dq == DqBegin::Persistent && mode.rounds_queries && dq_rounding.is_none();
        let clears = mode.dq != DqBegin::Sums && !zeroes_sums;
        Ok(Self {
            function,
            rows_function,
            problem: problem.clone(),
            mode,
            choice,
            tile_keys: schedule.tiles().iter().map(keys).collect(),
            schedule: DeviceSchedule::new(stream, schedule)?,
            queue,
            statistics,
            coverage: DeviceBuffer::from_slice(stream, coverage)?,
            rounds: tables.rounds(heads_q),
            rounds_overlapped: scheduler.rounds_overlapped,
            progress: DeviceBuffer::new(device, 4 * (ROUNDING + (2 * coverage.len() + counters) * heads_q))?,
            dq_order,
            waits: missed.map(|what| CtaWaits::new(device, what)).transpose()?,
            classes: scheduler.classes.clone(),
            items: scheduler.items,
            alone: None,
            half_heads: half_heads.transpose()?,
            sums: sums.transpose()?,
            blocks_per_head: tables.blocks_per_head,
            heads_at_a_time: scheduler.heads_at_a_time,
            launch: scheduler.launch(&choice),
            rows_launch: rows_launch(problem, clears, workers),
            clears,
            zeroes_sums,
            dq_rounding,
        })
    }

    /// From now on gradients of keys that nobody else has any of are no f32 partial sums but results: all of tiles that have none of the
    /// `shared` rows, nor one that arrives. Gives these tiles' keys; launches then say where the results are
    /// ([`BackwardTensors::rounded`]). None in deterministic mode, nor where all are results.
    ///
    /// # Errors
    /// When memory is short.
    pub fn round_alone(&mut self, stream: &Stream, shared: &[Range]) -> Result<Vec<Range>, CudaError> {
        if !self.choice.alone() {
            return Ok(Vec::new());
        }
        let own_rows = self.problem.rows_k - self.problem.rows_arriving;
        let flags = alone(&self.tile_keys, own_rows, shared);
        let alone = self.tile_keys.iter().zip(&flags).filter(|tile| *tile.1 != 0);
        let alone: Vec<Range> = alone.map(|tile| *tile.0).collect();
        self.alone = if alone.is_empty() { None } else { Some(DeviceBuffer::from_slice(stream, &flags)?) };
        Ok(alone)
    }

    /// Enqueues the backward. Nothing is allocated, and nothing waits but for rows that arrive.
    ///
    /// # Safety
    /// As of [`super::AttentionForward::launch`] for rows that arrive. `tensors` are addresses of what [`BackwardTensors`] says, for
    /// this value's problem and mode, which live until the kernels have run; what is written overlaps nothing else. This value
    /// lives as long, and its earlier run has finished or is before this one on the same stream.
    ///
    /// # Errors
    /// [`CudaError::TensorMap`] for an address that is no multiple of 16, or the driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &BackwardTensors) -> Result<(), CudaError> {
        let AttentionProblem { rows_q, heads_q, head_dim, .. } = self.problem;
        if rows_q > 0 {
            let rows = AttentionBackwardRowsArguments {
                lse: tensors.lse,
                delta: tensors.delta,
                statistics: self.statistics.address(),
                words: self.progress.address(),
                coverage: self.coverage.address(),
                dq: tensors.dq,
                rounded: self.rounded_in_kernel(tensors),
                word_count: self.progress.len() as u64 / 4,
                slab_rows: self.choice.shape.rows,
                clears: u32::from(self.clears),
                rows: rows_q as u32,
                heads: heads_q as u32,
                head_dim: head_dim as u32,
                pitch: statistic_pitch(rows_q) as u32,
            };
            // SAFETY: the arguments are those of the kernel in `rows_source`, a test compares their layouts; the rest is the
            // caller's promise.
            unsafe { self.rows_function.launch(stream, &self.rows_launch, &(rows,))? };
        }
        if self.schedule.tile_count() > 0 {
            let params = self.params(tensors)?;
            // SAFETY: likewise, of the kernel in `BackwardChoice::source`.
            unsafe { self.function.launch(stream, &self.launch, &params)? };
        }
        // SAFETY: the caller's promise.
        self.dq_rounding.as_ref().map_or(Ok(()), |rounding| unsafe { rounding.launch(stream, tensors) })
    }

    /// Where the kernels themselves round dq to, or null.
    fn rounded_in_kernel(&self, tensors: &BackwardTensors) -> u64 {
        match self.dq_rounding {
            Some(_) => 0,
            None => tensors.rounded_dq.unwrap_or(0),
        }
    }

    /// Where the kernel says that a CTA never did what another waited for; `None` where nobody waits.
    pub fn waits(&self) -> Option<&CtaWaits> {
        self.waits.as_ref()
    }

    /// What the kernel of `choice` is given.
    fn params(&self, tensors: &BackwardTensors) -> Result<BackwardParams, CudaError> {
        let slab_words = (self.coverage.len() / 4 * self.problem.heads_q) as u64;
        let [summed_rows, summed, added] =
            [0, 1, 2].map(|at| self.progress.address() + 4 * (ROUNDING as u64 + at * slab_words));
        let rounding = BackwardRounding {
            dq: tensors.dq,
            rounded_dq: self.rounded_in_kernel(tensors),
            coverage: self.coverage.address(),
            summed_rows,
            summed,
            progress: self.progress.address(),
            slabs: self.rounds,
            overlapped: self.rounds_overlapped,
            rows_q: self.problem.rows_q as u32,
            zeroes_sums: u32::from(self.zeroes_sums),
        };
        let order = match &self.dq_order {
            Some(tables) => BackwardOrder::Fixed(BackwardDqOrder {
                spans: tables.spans.address(),
                begins: tables.begins.address(),
                added,
                ordered_from: if self.mode.dq == DqBegin::Sums { 1 } else { 2 },
                num_tiles: self.schedule.tile_count(),
                heads_at_a_time: self.heads_at_a_time,
            }),
            None => self.classes(tensors),
        };
        let rounding = self.choice.rounds_dq().then_some(rounding);
        Ok(BackwardParams { all: self.arguments(tensors)?, rounding, order })
    }

    /// The order of tiles that add in any order, with what else a kernel of such tiles has.
    fn classes(&self, tensors: &BackwardTensors) -> BackwardOrder {
        let mut ends = [self.schedule.tile_count(); CLASSES];
        ends[..self.classes.ends.len()].copy_from_slice(&self.classes.ends);
        let cursors = self.queue.address() + 4 * QUEUE_WORDS as u64;
        let classes = BackwardClasses { cursors, ends };
        let [dk, dv] = tensors.rounded.unwrap_or([0; 2]);
        if let Some(sums) = &self.sums {
            return BackwardOrder::Sums(classes, sums.arguments);
        }
        let alone = BackwardAlone { tiles: self.alone.as_ref().map_or(0, DeviceBuffer::address), dk, dv };
        match &self.half_heads {
            Some(words) => {
                let half_heads =
                    BackwardHalfHeads { words: words.address(), classes: self.classes.halved as u32 };
                BackwardOrder::Halves(classes, alone, half_heads)
            }
            None if self.choice.alone() => BackwardOrder::Alone(classes, alone),
            None => BackwardOrder::Classes(classes),
        }
    }

    // Long: one struct of the kernel's arguments, field by field.
    fn arguments(&self, tensors: &BackwardTensors) -> Result<AttentionBackwardArguments, CudaError> {
        // Bound once for all tensor maps.
        let _bound = self.function.device().make_current()?;
        let AttentionProblem { rows_q, rows_k, heads_q, heads_kv, head_dim, head_dim_v, .. } = self.problem;
        let AttentionProblem { element, scale, softcap, rows_arriving, .. } = self.problem;
        let shape = self.choice.shape;
        let map =
            |name: &str, kind: TensorMapElement, tensor: HeadRows, dims: [usize; 3], box_dims: [u32; 3]| {
                let spec = TensorMapSpec::new(kind, tensor.address, dims.map(|dim| dim as u64), box_dims);
                tensor.map(spec).swizzle(Swizzle::Span128).encode(self.function.device(), name)
            };
        let kind = element.tensor_map_element();
        let (key_box, row_box) = ([64, 1, shape.key_box()], [64, 1, shape.row_box()]);
        let own_rows = rows_k - rows_arriving;
        // No tensor of the copy engine is empty. Without rows none is read, and any address of this device will do.
        let any = self.statistics.address();
        let keys = |name: &str, tensor: HeadRows, dim, rows: usize| {
            let tensor = if rows == 0 { any.into() } else { tensor };
            map(name, kind, tensor, [dim, heads_kv, rows.max(1)], key_box)
        };
        let arriving = ArrivingTensors::of(tensors.arriving, rows_arriving)?;
        let rows = rows_q.max(1);
        let query = |tensor: HeadRows| if rows_q == 0 { any.into() } else { tensor };
        let [tiles, runs, bounds] = self.schedule.addresses();
        let pitch = 4 * statistic_pitch(rows_q) as u64;
        // Without rows the buffer has 4 bytes, which is as good as any address.
        let statistics = TensorMapSpec::new(
            TensorMapElement::F32,
            self.statistics.address(),
            [rows as u64, heads_q as u64, STATISTICS as u64],
            [shape.rows, 1, 1],
        )
        .strides([pitch.max(16), (pitch * heads_q as u64).max(16)])
        .encode(self.function.device(), "statistics")?;
        Ok(AttentionBackwardArguments {
            q: map("q", kind, query(tensors.q), [head_dim, heads_q, rows], row_box)?,
            dout: map("dout", kind, query(tensors.dout.into()), [head_dim_v, heads_q, rows], row_box)?,
            k: keys("k", tensors.k, head_dim, own_rows)?,
            v: keys("v", tensors.v, head_dim_v, own_rows)?,
            arriving_k: keys("arriving k", arriving.k.into(), head_dim, rows_arriving)?,
            arriving_v: keys("arriving v", arriving.v.into(), head_dim_v, rows_arriving)?,
            dq: map(
                "dq",
                TensorMapElement::F32,
                query(tensors.dq.into()),
                [head_dim, heads_q, rows],
                [32, 1, 64],
            )?,
            statistics,
            arrivals: arriving.arrivals.after(own_rows, rows_arriving),
            dk: tensors.dk,
            dv: tensors.dv,
            owner_rows: tensors.owners.map_or(0, |owners| owners.addresses),
            tiles,
            runs,
            bounds,
            queue: self.queue.address(),
            wait: self.waits.as_ref().map_or(WaitLimit::NONE, CtaWaits::limit),
            items: self.items,
            heads_kv: heads_kv as u32,
            group: (heads_q / heads_kv) as u32,
            head_dim: head_dim as u32,
            head_dim_v: head_dim_v as u32,
            blocks_per_head: self.blocks_per_head,
            own_rows: if rows_arriving == 0 { i32::MAX } else { own_rows as i32 },
            owner_rows_from: tensors.owners.map_or(i32::MAX, |owners| owners.first_row as i32),
            scale,
            scale_log2: softcap.map_or(scale, |softcap| 2.0 * scale / softcap) * LOG2_E,
            cap_log2: softcap.unwrap_or(0.0) * LOG2_E,
        })
    }
}

/// Of each tile's keys, 1 where all are among the first `own_rows` and none is `shared`.
fn alone(tile_keys: &[Range], own_rows: usize, shared: &[Range]) -> Vec<u32> {
    let is_alone =
        |keys: &Range| keys.end <= own_rows && shared.iter().all(|rows| rows.intersect(keys).is_empty());
    tile_keys.iter().map(|keys| u32::from(is_alone(keys))).collect()
}

/// Rows of the statistics of a head, padded to what the copy engine takes.
fn statistic_pitch(rows: usize) -> usize {
    rows.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_which_others_have_a_row_are_partials() {
        let keys = [(0, 128), (128, 200), (200, 328), (328, 330), (330, 400)].map(|(a, b)| Range::new(a, b));
        let shared = [(127, 128), (199, 210)].map(|(a, b)| Range::new(a, b));
        assert_eq!(alone(&keys, 330, &shared), [0, 0, 0, 1, 0]);
        assert_eq!(alone(&keys, 329, &[]), [1, 1, 1, 0, 0]);
    }
}
