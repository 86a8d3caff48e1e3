//! The launcher of `attention/portable_backward.cuh`, for GPUs without wgmma.

use counterpoint_tiles::{TileDirection, TileSchedule, TileScheduleConfig};
use serde::{Deserialize, Serialize};

use super::device_schedule::DeviceSchedule;
use super::portable_backward_query::PortableBackwardQuery;
use super::portable_launcher::{Cta, PortableKernel, exponential_scales, tiles, upload};
use super::portable_shape::{Traits, check, specialisations_of, traits_of};
use super::{
    AttentionFault, AttentionProblem, BackwardMode, BackwardTensors, DqBegin, ElementType, Specialisation,
};
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DescribedGpu, DeviceBuffer, Function, KernelSource, Launch, Stream};

/// Attention backward by mma.sync, for every GPU from compute capability 8.0 on: a problem prepared to run many times.
#[derive(Clone, Debug)]
pub struct PortableBackward {
    function: Function,
    schedule: DeviceSchedule,
    launch: Launch,
    /// Bytes of dq to clear first.
    cleared_bytes: usize,
    /// What computes dq where it must be the same in every run; otherwise the kernel adds to it in no order.
    queries: Option<PortableBackwardQuery>,
    arguments: PortableBackwardArguments,
}

/// Tables of a backward by the portable kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortableBackwardTables {
    keys: TileSchedule,
    /// Of the pass that computes dq where it must be the same in every run.
    queries: Option<TileSchedule>,
}

impl PortableBackwardTables {
    /// Those of a problem on a GPU.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when the problem is not one that the kernels take.
    pub fn new(gpu: &DescribedGpu, problem: &AttentionProblem) -> Result<Self, CudaError> {
        check(problem).map_err(refused)?;
        let Choice { shape, .. } = choose(gpu.shared_bytes_per_block, problem)?;
        let config =
            TileScheduleConfig::new(TileDirection::Backward, shape.tile_rows as usize, shape.block as usize);
        let keys = tiles("portable_backward", problem, &config)?;
        let queries = problem.deterministic.then(|| PortableBackwardQuery::tables(gpu, problem));
        Ok(Self { keys, queries: queries.transpose()? })
    }
}

/// What of the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    shape: Shape,
    element: ElementType,
    softcap: bool,
}

/// How warps divide a matrix: so many down its rows, so many across its columns.
type Grid = [u32; 2];

/// The work of a CTA: `tile_rows` keys, blocks of `block` queries in `stages` buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    head_dim: u32,
    head_dim_v: u32,
    tile_rows: u32,
    block: u32,
    stages: u32,
    /// Over `[queries, keys]`.
    score_warps: Grid,
    /// Over `[keys, head_dim]`.
    key_warps: Grid,
    /// Over `[queries, head_dim]`.
    query_warps: Grid,
    /// Of them on a multiprocessor.
    ctas: u32,
}

/// `PortableBackwardArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PortableBackwardArguments {
    tiles: u64,
    runs: u64,
    bounds: u64,
    q: u64,
    k: u64,
    v: u64,
    dout: u64,
    lse: u64,
    delta: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    float_gradients: u32,
    tile_count: u32,
    heads_q: u32,
    heads_kv: u32,
    head_dim: u32,
    head_dim_v: u32,
    rows_q: i32,
    scale: f32,
    scale_log2: f32,
    softcap_scale: f32,
}

impl Shape {
    /// The shape for padded dimensions on a device whose CTAs have at most `shared_bytes` of shared memory.
    fn of((head_dim, head_dim_v): (u32, u32), shared_bytes: usize) -> Self {
        let shape = |tile_rows, block, stages, score_warps, key_warps, query_warps, ctas| Self {
            head_dim,
            head_dim_v,
            tile_rows,
            block,
            stages,
            score_warps,
            key_warps,
            query_warps,
            ctas,
        };
        // From the most to the least shared memory: 227 KB on compute capability 9.0, 163 KB on 8.0, 99 KB on 8.6 and 8.9.
        let shapes: &[Self] = match head_dim {
            // 128 queries for 64: larger patches of dq read less shared memory.
            64 => &[
                shape(128, 128, 2, [2, 4], [4, 2], [4, 2], 1),
                shape(128, 64, 2, [2, 4], [4, 2], [4, 2], 1),
                shape(64, 64, 2, [2, 2], [2, 2], [2, 2], 1),
            ],
            96 => {
                &[shape(128, 64, 2, [2, 4], [4, 2], [4, 2], 1), shape(64, 64, 2, [2, 2], [2, 2], [2, 2], 1)]
            }
            128 => {
                &[shape(128, 64, 2, [2, 4], [4, 2], [2, 4], 1), shape(64, 64, 1, [2, 4], [2, 4], [2, 4], 1)]
            }
            192 => &[
                shape(64, 64, 2, [4, 2], [2, 4], [2, 4], 1),
                shape(64, 64, 1, [4, 2], [2, 4], [2, 4], 1),
                shape(64, 32, 1, [2, 4], [2, 4], [2, 4], 1),
            ],
            _ => &[
                shape(64, 64, 2, [4, 2], [2, 4], [2, 4], 1),
                shape(64, 64, 1, [4, 2], [2, 4], [2, 4], 1),
                shape(32, 32, 1, [2, 2], [2, 2], [2, 2], 1),
            ],
        };
        let fitting = shapes.iter().find(|shape| shape.shared_bytes() as usize <= shared_bytes);
        *fitting.unwrap_or(&shapes[shapes.len() - 1])
    }

    const fn cta(self) -> Cta {
        Cta { threads: self.threads(), shared_bytes: self.shared_bytes(), per_sm: self.ctas }
    }

    const fn threads(self) -> u32 {
        32 * self.score_warps[0] * self.score_warps[1]
    }

    /// Dynamic shared memory: keys and values, weights and their gradients, and the stages of queries, dout and statistics.
    const fn shared_bytes(self) -> u32 {
        let dims = self.head_dim + self.head_dim_v;
        let stage = 2 * self.block * dims + 8 * self.block;
        2 * self.tile_rows * dims + 4 * self.block * self.tile_rows + self.stages * stage
    }
}

impl Choice {
    fn of((dims, element, softcap, shared_bytes): Traits) -> Self {
        Self { shape: Shape::of(dims, shared_bytes), element, softcap }
    }

    fn source(self, arch: Arch) -> KernelSource {
        let Self { shape, element, softcap } = self;
        let Shape { head_dim, head_dim_v, tile_rows, block, stages, .. } = shape;
        let grid = |[down, across]: Grid| format!("WarpGrid<{down}, {across}>");
        let (scores, keys, queries) =
            (grid(shape.score_warps), grid(shape.key_warps), grid(shape.query_warps));
        let cap = if softcap { "_softcap" } else { "" };
        let name = format!(
            "portable_backward_{}_{head_dim}_{head_dim_v}_{tile_rows}x{block}x{stages}{cap}",
            element.name()
        );
        let config = format!(
            "PortableBackwardConfig<{head_dim}, {head_dim_v}, {tile_rows}, {block}, {stages}, {scores}, {keys}, {queries}, \
             {softcap}>"
        );
        PortableKernel {
            function: "portable_backward",
            arguments: "PortableBackwardArguments",
            name: &name,
            config: &config,
            element,
            cta: shape.cta(),
        }
        .source(arch)
    }
}

impl PortableBackward {
    /// Makes a problem ready by its tables: compiles or finds the kernels and uploads them by `setup`, which is waited for.
    ///
    /// # Errors
    /// When a kernel cannot be compiled, or memory is short.
    pub fn new(
        setup: &Stream,
        problem: &AttentionProblem,
        mode: BackwardMode,
        tables: &PortableBackwardTables,
    ) -> Result<Self, CudaError> {
        let device = setup.device();
        let choice = choose(device.properties().shared_bytes_per_block, problem)?;
        let Choice { shape, .. } = choice;
        let function = device.function(&choice.source(Arch::portable(device.capability())))?;
        let (schedule, launch) = upload(setup, problem, &tables.keys, problem.heads_kv, shape.cta())?;
        let [scale_log2, softcap_scale] = exponential_scales(problem, problem.scale);

        let arguments = PortableBackwardArguments {
            tiles: 0,
            runs: 0,
            bounds: 0,
            q: 0,
            k: 0,
            v: 0,
            dout: 0,
            lse: 0,
            delta: 0,
            dq: 0,
            dk: 0,
            dv: 0,
            float_gradients: u32::from(!mode.rounds_keys),
            tile_count: schedule.tile_count(),
            heads_q: problem.heads_q as u32,
            heads_kv: problem.heads_kv as u32,
            head_dim: problem.head_dim as u32,
            head_dim_v: problem.head_dim_v as u32,
            rows_q: problem.rows_q as i32,
            scale: problem.scale,
            scale_log2,
            softcap_scale,
        };
        let dq_bytes = 4 * problem.rows_q * problem.heads_q * problem.head_dim;
        let continues_dq = mode.dq == DqBegin::Sums;
        let cleared_bytes = if continues_dq || problem.deterministic { 0 } else { dq_bytes };
        let queries = tables.queries.as_ref();
        let queries = queries
            .map(|tables| PortableBackwardQuery::new(setup, problem, continues_dq, tables))
            .transpose()?;
        Ok(Self { function, schedule, launch, cleared_bytes, queries, arguments })
    }

    /// Enqueues the backward, and before it the clearing of dq where the mode says so. Nothing on the device is allocated and
    /// nothing waits.
    ///
    /// # Safety
    /// `tensors` are addresses of what [`BackwardTensors`] says, of this value's problem, which live until the kernel has run;
    /// what is written overlaps nothing else that is used. This value lives as long.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &BackwardTensors) -> Result<(), CudaError> {
        let BackwardTensors { q, k, v, dout, lse, delta, dq, dk, dv, .. } = *tensors;
        let name = self.function.name();
        let (q, k, v) = (q.dense(name)?, k.dense(name)?, v.dense(name)?);
        if self.cleared_bytes > 0 {
            // SAFETY: dq has so many bytes, by the caller's promise.
            unsafe { DeviceBuffer::borrow(stream.device(), dq, self.cleared_bytes) }.fill(stream, 0)?;
        }
        if let Some(queries) = &self.queries {
            // SAFETY: as for this.
            unsafe { queries.launch(stream, tensors) }?;
        }
        if self.schedule.tile_count() == 0 {
            return Ok(());
        }
        let dq = if self.queries.is_some() { 0 } else { dq };
        let [tiles, runs, bounds] = self.schedule.addresses();
        let arguments = PortableBackwardArguments {
            tiles,
            runs,
            bounds,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
            ..self.arguments
        };
        // SAFETY: the arguments are those of the kernel in `Choice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(arguments,)) }
    }
}

/// What of the kernel a problem takes on a device whose CTAs have at most `shared_bytes` of shared memory.
fn choose(shared_bytes: usize, problem: &AttentionProblem) -> Result<Choice, CudaError> {
    traits_of(shared_bytes, problem).map(Choice::of).map_err(refused)
}

fn refused(fault: AttentionFault) -> CudaError {
    CudaError::Launch { kernel: "portable_backward".to_owned(), reason: fault.into() }
}

/// For every head, element type, softcap and kind of GPU.
pub(super) fn specialisations() -> Vec<Specialisation> {
    specialisations_of(Choice::of, |choice, arch| {
        (choice.source(arch), choice.shape.threads(), choice.shape.ctas)
    })
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "attention/portable_backward.cuh",
        PortableBackwardArguments {
            tiles,
            runs,
            bounds,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
            float_gradients,
            tile_count,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            rows_q,
            scale,
            scale_log2,
            softcap_scale,
        }
    )]
}

#[cfg(test)]
mod tests {
    use super::super::portable_shape::every_traits;
    use super::*;

    #[test]
    fn every_shape_fits_its_device() {
        for (_, traits) in every_traits() {
            let Choice { shape, .. } = Choice::of(traits);
            assert!(shape.shared_bytes() as usize <= traits.3, "{shape:?} for {traits:?}");
        }
    }
}
