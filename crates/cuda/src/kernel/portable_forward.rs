//! The launcher of `attention/portable_forward.cuh`, for GPUs without wgmma.

use counterpoint_tiles::{TileDirection, TilePlacement, TileSchedule, TileScheduleConfig};

use super::device_schedule::DeviceSchedule;
use super::portable_launcher::{Cta, PortableKernel, exponential_scales, tiles, upload};
use super::portable_shape::{Traits, check, fits, specialisations_of, traits_of};
use super::{
    AttentionFault, AttentionProblem, ElementType, ForwardMode, ForwardModeEnd, ForwardTarget,
    ForwardTensors, ResultTensors, Specialisation, StateTensors,
};
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DescribedGpu, Function, KernelSource, Launch, Stream};

/// Attention forward by mma.sync, for every GPU from compute capability 8.0 on: a problem prepared to run many times.
#[derive(Clone, Debug)]
pub struct PortableForward {
    function: Function,
    schedule: DeviceSchedule,
    launch: Launch,
    mode: ForwardMode,
    arguments: PortableForwardArguments,
}

/// What of the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    shape: Shape,
    element: ElementType,
    softcap: bool,
    blocks: TilePlacement,
    max_logits: bool,
}

/// The work of a CTA: `warps` warps of `warp_rows` query rows, blocks of `block` keys, `ctas` of them on a multiprocessor. Its
/// warps keep `held_columns` columns of their queries in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    head_dim: u32,
    head_dim_v: u32,
    warp_rows: u32,
    warps: u32,
    block: u32,
    held_columns: u32,
    ctas: u32,
}

/// `PortableForwardArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PortableForwardArguments {
    tiles: u64,
    runs: u64,
    bounds: u64,
    q: u64,
    k: u64,
    v: u64,
    sink: u64,
    out: u64,
    lse: u64,
    begin_acc: u64,
    begin_row_max: u64,
    begin_row_sum: u64,
    acc: u64,
    row_max: u64,
    row_sum: u64,
    partial_out: u64,
    partial_lse: u64,
    max_logits: u64,
    tile_count: u32,
    heads_q: u32,
    heads_kv: u32,
    head_dim: u32,
    head_dim_v: u32,
    seqlen_sink: u32,
    rows_k: i32,
    scale_log2: f32,
    softcap_scale: f32,
    negate: u32,
}

impl Shape {
    /// The shape for padded dimensions on a device whose CTAs have at most `shared_bytes` of shared memory.
    fn of((head_dim, head_dim_v): (u32, u32), softcap: bool, shared_bytes: usize) -> Self {
        let shape = |warp_rows, warps, block, held_columns, ctas| Self {
            head_dim,
            head_dim_v,
            warp_rows,
            warps,
            block,
            held_columns,
            ctas,
        };
        // A softcap takes registers that 64 keys leave none of.
        let block = if softcap && head_dim_v == 128 { 48 } else { 64 };
        // 32 rows a warp halve the reads of shared memory, as long as their accumulators find room. Two CTAs wait at different
        // times; where only one finds room, it is one of twice the warps.
        let shapes: &[Self] = match (head_dim, head_dim_v) {
            (..=128, _) => &[shape(32, 4, block, 0, 2)],
            (192, 128) => &[shape(32, 4, block, 0, 2), shape(16, 8, 64, 192, 1)],
            (192, _) => &[shape(16, 4, 64, 0, 2), shape(16, 8, 64, 192, 1)],
            _ => &[shape(16, 4, 64, 0, 2), shape(16, 8, 64, 0, 1), shape(16, 4, 32, 0, 1)],
        };
        let fits = |shape: &&Self| fits(shape.shared_bytes(), shape.ctas, shared_bytes);
        *shapes.iter().find(fits).unwrap_or(&shapes[shapes.len() - 1])
    }

    /// The same for blocks that divide [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK) and for rows that begin with a state, which
    /// take a few more registers.
    fn aligned(dims: (u32, u32), shared_bytes: usize) -> Self {
        let (head_dim, head_dim_v) = dims;
        let shape = |warp_rows, warps, block, ctas| Self {
            head_dim,
            head_dim_v,
            warp_rows,
            warps,
            block,
            held_columns: 0,
            ctas,
        };
        let shapes: &[Self] = match dims {
            (64, _) => &[shape(32, 4, 64, 2)],
            (96 | 128, _) => &[shape(32, 4, 32, 2)],
            (192, _) => &[shape(16, 4, 64, 2), shape(16, 8, 64, 1)],
            _ => &[shape(16, 4, 32, 2), shape(16, 8, 32, 1), shape(16, 4, 32, 1)],
        };
        let fits = |shape: &&Self| fits(shape.shared_bytes(), shape.ctas, shared_bytes);
        *shapes.iter().find(fits).unwrap_or(&shapes[shapes.len() - 1])
    }

    const fn tile_rows(self) -> u32 {
        self.warp_rows * self.warps
    }

    const fn cta(self) -> Cta {
        Cta { threads: self.threads(), shared_bytes: self.shared_bytes(), per_sm: self.ctas }
    }

    const fn threads(self) -> u32 {
        32 * self.warps
    }

    /// Dynamic shared memory: queries, keys and values of 2 bytes an element.
    const fn shared_bytes(self) -> u32 {
        2 * (self.tile_rows() * self.head_dim + self.block * (self.head_dim + self.head_dim_v))
    }
}

impl Choice {
    fn of(blocks: TilePlacement, (dims, element, softcap, shared_bytes): Traits) -> Self {
        let shape = match blocks {
            TilePlacement::Tight => Shape::of(dims, softcap, shared_bytes),
            TilePlacement::Aligned => Shape::aligned(dims, shared_bytes),
        };
        Self { shape, element, softcap, blocks, max_logits: false }
    }

    /// Whether the largest scores are wanted.
    fn with_max_logits(mut self, max_logits: bool) -> Self {
        self.max_logits = max_logits;
        if !max_logits {
            return self;
        }
        let Shape { head_dim, head_dim_v, warp_rows, ref mut block, .. } = self.shape;
        // The register that they take is one too many besides the usual blocks.
        *block = match (self.blocks, head_dim, head_dim_v) {
            (TilePlacement::Aligned, 64 | 128, _) if warp_rows == 32 => *block / 2,
            (TilePlacement::Tight, 192, 128) if warp_rows == 32 => (*block).min(32),
            (TilePlacement::Tight, 96, _) => (*block).min(48),
            (TilePlacement::Tight, 128, _) if self.softcap => (*block).min(32),
            (TilePlacement::Tight, 256, _) => (*block).min(32),
            _ => *block,
        };
        self
    }

    fn source(self, arch: Arch) -> KernelSource {
        let Self { shape, element, softcap, blocks, max_logits } = self;
        let Shape { head_dim, head_dim_v, warp_rows, warps, block, held_columns, .. } = shape;
        let cap = if softcap { "_softcap" } else { "" };
        let aligned = blocks == TilePlacement::Aligned;
        let state = if aligned { "_aligned" } else { "" };
        let largest = if max_logits { "_max_logits" } else { "" };
        let tile_rows = shape.tile_rows();
        let name = format!(
            "portable_forward_{}_{head_dim}_{head_dim_v}_{tile_rows}x{block}{cap}{state}{largest}",
            element.name()
        );
        let config = format!(
            "PortableForwardConfig<{head_dim}, {head_dim_v}, {warp_rows}, {warps}, {block}, {held_columns}, {softcap}, \
             {aligned}, {max_logits}>"
        );
        PortableKernel {
            function: "portable_forward",
            arguments: "PortableForwardArguments",
            name: &name,
            config: &config,
            element,
            cta: shape.cta(),
        }
        .source(arch)
    }
}

impl PortableForward {
    /// The tiles of a problem on a GPU: its tables.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when the problem is not one that the kernel takes.
    pub fn tables(
        gpu: &DescribedGpu,
        problem: &AttentionProblem,
        mode: ForwardMode,
    ) -> Result<TileSchedule, CudaError> {
        check(problem).map_err(refused)?;
        let Choice { shape, blocks, .. } = choose(gpu.shared_bytes_per_block, problem, mode)?;
        let config = TileScheduleConfig {
            blocks,
            ..TileScheduleConfig::new(
                TileDirection::Forward,
                shape.tile_rows() as usize,
                shape.block as usize,
            )
        };
        tiles("portable_forward", problem, &config)
    }

    /// Makes a problem ready by its tables: compiles or finds the kernel and uploads them by `setup`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or memory is short.
    pub fn new(
        setup: &Stream,
        problem: &AttentionProblem,
        mode: ForwardMode,
        tables: &TileSchedule,
    ) -> Result<Self, CudaError> {
        let device = setup.device();
        let choice = choose(device.properties().shared_bytes_per_block, problem, mode)?;
        let Choice { shape, .. } = choice;
        let seqlen_sink = match mode.end {
            ForwardModeEnd::State | ForwardModeEnd::Partial => 0,
            ForwardModeEnd::Result { seqlen_sink } => seqlen_sink,
        };
        let function = device.function(&choice.source(Arch::portable(device.capability())))?;
        let (schedule, launch) = upload(setup, problem, tables, problem.heads_q, shape.cta())?;

        // Scores keep their order: a scale below zero is its opposite, and zero so small a number that all scores are zero.
        let scale = problem.scale.abs().max(1e-30);
        let [scale_log2, softcap_scale] = exponential_scales(problem, scale);
        let arguments = PortableForwardArguments {
            tiles: 0,
            runs: 0,
            bounds: 0,
            q: 0,
            k: 0,
            v: 0,
            sink: 0,
            out: 0,
            lse: 0,
            begin_acc: 0,
            begin_row_max: 0,
            begin_row_sum: 0,
            acc: 0,
            row_max: 0,
            row_sum: 0,
            partial_out: 0,
            partial_lse: 0,
            max_logits: 0,
            tile_count: schedule.tile_count(),
            heads_q: problem.heads_q as u32,
            heads_kv: problem.heads_kv as u32,
            head_dim: problem.head_dim as u32,
            head_dim_v: problem.head_dim_v as u32,
            seqlen_sink: seqlen_sink as u32,
            rows_k: problem.rows_k as i32,
            scale_log2,
            softcap_scale,
            negate: u32::from(problem.scale < 0.0),
        };
        Ok(Self { function, schedule, launch, mode, arguments })
    }

    /// Enqueues the forward. Nothing is allocated and nothing waits.
    ///
    /// # Safety
    /// `tensors` are addresses of what [`ForwardTensors`] says, of this value's problem, which live until the kernel has run;
    /// what is written overlaps nothing else that is used. This value lives as long.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when the tensors are not those of the mode; the driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), CudaError> {
        let ForwardTensors { q, k, v, begin, end, .. } = *tensors;
        let name = self.function.name();
        let (q, k, v) = (q.dense(name)?, k.dense(name)?, v.dense(name)?);
        let [tiles, runs, bounds] = self.schedule.addresses();
        let mut arguments = PortableForwardArguments {
            tiles,
            runs,
            bounds,
            q,
            k,
            v,
            max_logits: tensors.largest(&self.mode, name)?,
            ..self.arguments
        };
        match (self.mode.end, end) {
            (ForwardModeEnd::State, ForwardTarget::State(StateTensors { acc, row_max, row_sum })) => {
                (arguments.acc, arguments.row_max, arguments.row_sum) = (acc, row_max, row_sum);
            }
            (ForwardModeEnd::Result { .. }, ForwardTarget::Result(ResultTensors { sink, out, lse })) => {
                (arguments.sink, arguments.out, arguments.lse) = (sink, out, lse);
            }
            _ => return Err(self.other_mode(tensors)),
        }
        match (self.mode.continues, begin) {
            (true, Some(StateTensors { acc, row_max, row_sum })) => {
                (arguments.begin_acc, arguments.begin_row_max, arguments.begin_row_sum) =
                    (acc, row_max, row_sum);
            }
            (false, None) => {}
            _ => return Err(self.other_mode(tensors)),
        }
        if self.schedule.tile_count() == 0 {
            return Ok(());
        }
        // SAFETY: the arguments are those of the kernel in `Choice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(arguments,)) }
    }

    fn other_mode(&self, tensors: &ForwardTensors) -> CudaError {
        let (mode, tensors) = (format!("{:?}", self.mode), format!("{tensors:?}"));
        let reason = AttentionFault::OtherMode { mode, tensors }.into();
        CudaError::Launch { kernel: self.function.name().to_owned(), reason }
    }
}

/// What of the kernel a problem takes on a device whose CTAs have at most `shared_bytes` of shared memory.
fn choose(shared_bytes: usize, problem: &AttentionProblem, mode: ForwardMode) -> Result<Choice, CudaError> {
    if mode.end == ForwardModeEnd::Partial {
        return Err(refused(AttentionFault::NoPartials));
    }
    let traits = traits_of(shared_bytes, problem).map_err(refused)?;
    let blocks = if problem.deterministic { TilePlacement::Aligned } else { TilePlacement::Tight };
    Ok(Choice::of(blocks, traits).with_max_logits(mode.max_logits))
}

fn refused(fault: AttentionFault) -> CudaError {
    CudaError::Launch { kernel: "portable_forward".to_owned(), reason: fault.into() }
}

/// For every head, element type, softcap, kind of GPU and placement of blocks.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let placed = |blocks, max_logits| {
        specialisations_of(
            move |traits| Choice::of(blocks, traits).with_max_logits(max_logits),
            |choice, arch| (choice.source(arch), choice.shape.threads(), choice.shape.ctas),
        )
    };
    let kinds =
        [TilePlacement::Tight, TilePlacement::Aligned].map(|blocks| [(blocks, false), (blocks, true)]);
    kinds.into_iter().flatten().flat_map(|(blocks, max_logits)| placed(blocks, max_logits)).collect()
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "attention/portable_forward_config.cuh",
        PortableForwardArguments {
            tiles,
            runs,
            bounds,
            q,
            k,
            v,
            sink,
            out,
            lse,
            begin_acc,
            begin_row_max,
            begin_row_sum,
            acc,
            row_max,
            row_sum,
            partial_out,
            partial_lse,
            max_logits,
            tile_count,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            seqlen_sink,
            rows_k,
            scale_log2,
            softcap_scale,
            negate,
        }
    )]
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::KEY_BLOCK;

    use super::super::portable_shape::every_traits;
    use super::*;

    #[test]
    fn every_shape_fits_its_device() {
        for (_, traits) in every_traits() {
            for blocks in [TilePlacement::Tight, TilePlacement::Aligned] {
                let Choice { shape, .. } = Choice::of(blocks, traits);
                assert!(shape.shared_bytes() as usize <= traits.3, "{shape:?} for {traits:?}");
            }
        }
    }

    #[test]
    fn aligned_blocks_divide_the_unit_of_stages() {
        for (_, traits) in every_traits() {
            let Choice { shape, .. } = Choice::of(TilePlacement::Aligned, traits);
            assert!(KEY_BLOCK.is_multiple_of(shape.block as usize), "{shape:?} for {traits:?}");
        }
    }
}
