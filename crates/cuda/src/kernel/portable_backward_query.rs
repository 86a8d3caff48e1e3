//! The launcher of `attention/portable_backward_query.cuh`: dq without atomics where its bits must be the same.

use counterpoint_tiles::{TileDirection, TileSchedule, TileScheduleConfig};

use super::device_schedule::DeviceSchedule;
use super::portable_launcher::{Cta, PortableKernel, exponential_scales, tiles, upload};
use super::portable_shape::{Traits, specialisations_of, traits_of};
use super::{AttentionFault, AttentionProblem, BackwardTensors, ElementType, Specialisation};
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DescribedGpu, Function, KernelSource, Launch, Stream};

/// The pass of a deterministic [`PortableBackward`](super::PortableBackward) that computes dq, by tiles of queries.
#[derive(Clone, Debug)]
pub(super) struct PortableBackwardQuery {
    function: Function,
    schedule: DeviceSchedule,
    launch: Launch,
    arguments: PortableBackwardQueryArguments,
}

/// What of the kernel is compiled: `WARPS` warps of 16 query rows, blocks of `block` keys, `ctas` of them on a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    dims: (u32, u32),
    block: u32,
    ctas: u32,
    element: ElementType,
    softcap: bool,
}

const WARPS: u32 = 4;
const TILE_ROWS: u32 = 16 * WARPS;
const THREADS: u32 = 32 * WARPS;

/// `PortableBackwardQueryArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PortableBackwardQueryArguments {
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
    add: u32,
    tile_count: u32,
    heads_q: u32,
    heads_kv: u32,
    head_dim: u32,
    head_dim_v: u32,
    rows_k: i32,
    scale: f32,
    scale_log2: f32,
    softcap_scale: f32,
}

impl Choice {
    fn of((dims, element, softcap, _): Traits) -> Self {
        // As many keys as registers hold two patches of scores for.
        let (block, ctas) = match dims.0 {
            ..=64 => (64, 3),
            65..=128 => (64, 2),
            _ => (32, 2),
        };
        Self { dims, block, ctas, element, softcap }
    }

    /// Dynamic shared memory: queries and dout, keys and values.
    const fn shared_bytes(self) -> u32 {
        2 * (TILE_ROWS + self.block) * (self.dims.0 + self.dims.1)
    }

    const fn cta(self) -> Cta {
        Cta { threads: THREADS, shared_bytes: self.shared_bytes(), per_sm: self.ctas }
    }

    fn source(self, arch: Arch) -> KernelSource {
        let Self { dims: (head_dim, head_dim_v), block, element, softcap, .. } = self;
        let cap = if softcap { "_softcap" } else { "" };
        let name = format!("portable_backward_query_{}_{head_dim}_{head_dim_v}{cap}", element.name());
        let config =
            format!("PortableBackwardQueryConfig<{head_dim}, {head_dim_v}, {WARPS}, {block}, {softcap}>");
        PortableKernel {
            function: "portable_backward_query",
            arguments: "PortableBackwardQueryArguments",
            name: &name,
            config: &config,
            element,
            cta: self.cta(),
        }
        .source(arch)
    }
}

impl PortableBackwardQuery {
    /// The tiles of a problem on a GPU.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when the problem is not one that the kernel takes.
    pub(super) fn tables(gpu: &DescribedGpu, problem: &AttentionProblem) -> Result<TileSchedule, CudaError> {
        let choice = choose(gpu.shared_bytes_per_block, problem)?;
        let config =
            TileScheduleConfig::new(TileDirection::Forward, TILE_ROWS as usize, choice.block as usize);
        tiles("portable_backward_query", problem, &config)
    }

    /// Makes a problem ready by its tiles. dq goes on from what is there if `add`, otherwise it is written.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or memory is short.
    pub(super) fn new(
        setup: &Stream,
        problem: &AttentionProblem,
        add: bool,
        tables: &TileSchedule,
    ) -> Result<Self, CudaError> {
        let device = setup.device();
        let choice = choose(device.properties().shared_bytes_per_block, problem)?;
        let function = device.function(&choice.source(Arch::portable(device.capability())))?;
        let (schedule, launch) = upload(setup, problem, tables, problem.heads_q, choice.cta())?;
        let [scale_log2, softcap_scale] = exponential_scales(problem, problem.scale);
        let arguments = PortableBackwardQueryArguments {
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
            add: u32::from(add),
            tile_count: schedule.tile_count(),
            heads_q: problem.heads_q as u32,
            heads_kv: problem.heads_kv as u32,
            head_dim: problem.head_dim as u32,
            head_dim_v: problem.head_dim_v as u32,
            rows_k: problem.rows_k as i32,
            scale: problem.scale,
            scale_log2,
            softcap_scale,
        };
        Ok(Self { function, schedule, launch, arguments })
    }

    /// Enqueues the pass.
    ///
    /// # Safety
    /// As [`PortableBackward::launch`](super::PortableBackward::launch).
    ///
    /// # Errors
    /// When the driver refuses.
    pub(super) unsafe fn launch(&self, stream: &Stream, tensors: &BackwardTensors) -> Result<(), CudaError> {
        if self.schedule.tile_count() == 0 {
            return Ok(());
        }
        let BackwardTensors { q, k, v, dout, lse, delta, dq, .. } = *tensors;
        let name = self.function.name();
        let (q, k, v) = (q.dense(name)?, k.dense(name)?, v.dense(name)?);
        let [tiles, runs, bounds] = self.schedule.addresses();
        let arguments = PortableBackwardQueryArguments {
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
            ..self.arguments
        };
        // SAFETY: the arguments are those of the kernel in `Choice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(arguments,)) }
    }
}

/// What of the kernel a problem takes on a device whose CTAs have at most `shared_bytes` of shared memory.
fn choose(shared_bytes: usize, problem: &AttentionProblem) -> Result<Choice, CudaError> {
    traits_of(shared_bytes, problem).map(Choice::of).map_err(|fault: AttentionFault| CudaError::Launch {
        kernel: "portable_backward_query".to_owned(),
        reason: fault.into(),
    })
}

/// For every head, element type, softcap and kind of GPU.
pub(super) fn specialisations() -> Vec<Specialisation> {
    specialisations_of(Choice::of, |choice, arch| (choice.source(arch), THREADS, choice.ctas))
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "attention/portable_backward_query.cuh",
        PortableBackwardQueryArguments {
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
            add,
            tile_count,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            rows_k,
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
            let choice = Choice::of(traits);
            assert!(choice.shared_bytes() as usize <= traits.3, "{choice:?} for {traits:?}");
        }
    }
}
