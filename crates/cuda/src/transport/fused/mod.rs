//! Fused operations: GEMMs and attention backwards with their collectives as one kernel, and what those have in common.

mod backward_reduce;
mod cast_gemm;
mod gemm_reduce;
mod product_side;

pub(super) use backward_reduce::BackwardReduceWork;
pub(super) use cast_gemm::CastGemmWork;
pub(super) use gemm_reduce::GemmReduceWork;

use counterpoint_exec::OpPlace;
use counterpoint_mask::Range;
use counterpoint_plan::DType;
use counterpoint_schedule::{
    self as schedule, Accumulate, BufferId, BufferSpec, Program, RowBlock, RowBlocks,
};

use super::{CallError, CudaTransport};
use crate::backend::CudaBuffer;
use crate::kernel::{ElementType, GemmEpilogue, GemmLayout, GemmSpec};
use crate::{CallFault, CudaError};

/// A row of a buffer.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) buffer: BufferId,
    /// Bytes before it.
    pub(super) offset: u64,
}

impl Rows {
    pub(super) fn address(&self, buffers: &[CudaBuffer]) -> u64 {
        buffers[self.buffer.0].address() + self.offset
    }
}

/// The type of operands that kernels multiply.
fn element_of(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::Bf16 => Some(ElementType::Bf16),
        DType::F16 => Some(ElementType::F16),
        DType::F32 | DType::F64 => None,
    }
}

/// The layout of activations; gradients of weights do not travel.
fn layout_of(layout: schedule::GemmLayout) -> Option<GemmLayout> {
    match layout {
        schedule::GemmLayout::Nt => Some(GemmLayout::Nt),
        schedule::GemmLayout::Nn => Some(GemmLayout::Nn),
        schedule::GemmLayout::Tn => None,
    }
}

/// The product as a kernel computes it, of `m` rows that are as long and of the type as those of `a`; `None` when its result is not
/// one new tensor of them, or when there is no kernel for it.
pub(super) fn product_of(
    gemm: &schedule::Gemm,
    a: BufferId,
    m: usize,
    program: &Program,
) -> Option<GemmSpec> {
    let (rows, out) = (&program.buffers[a.0], &program.buffers[gemm.out.0]);
    let is_new = gemm.out_rows.only() == Some(Range::new(0, m))
        && out.rows() == m
        && gemm.accumulate == Accumulate::Start
        && out.dtype == rows.dtype;
    if !is_new {
        return None;
    }
    let (n, k) = (out.row_elements(), rows.row_elements());
    let mut product = GemmSpec::new(m, n, k, layout_of(gemm.layout)?, element_of(rows.dtype)?);
    product.pass_rows = gemm.pass_rows;
    if gemm.bias.is_some() {
        product.epilogue = GemmEpilogue::StoreBias;
    }
    product.sm_margin = program.policy.sm_margin().try_into().unwrap_or(u32::MAX);
    Some(product)
}

/// Where blocks begin that follow each other in one buffer, and how many rows they have together.
pub(super) fn one_range(blocks: &RowBlocks, specs: &[BufferSpec]) -> Option<(Rows, usize)> {
    let RowBlock { buffer, rows } = blocks.together()?;
    let spec = &specs[buffer.0];
    let offset = rows.start as u64 * (spec.row_elements() * spec.dtype.size()) as u64;
    Some((Rows { buffer, offset }, rows.len()))
}

/// An operand that is the rows of one buffer.
pub(super) fn whole(blocks: &RowBlocks, specs: &[BufferSpec]) -> Option<Rows> {
    one_range(blocks, specs).map(|(rows, _)| rows)
}

impl CudaTransport {
    /// Whether memory that other ranks write is where it was when ranks connected.
    pub(super) fn check_unmoved(&self, place: &OpPlace, known: u64, now: u64) -> Result<(), CallError> {
        if known == now {
            return Ok(());
        }
        Err(CudaError::Launch { kernel: place.to_string(), reason: CallFault::Moved.into() }.into())
    }
}
