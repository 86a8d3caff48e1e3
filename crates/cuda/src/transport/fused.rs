//! What products whose rows travel while they are computed have in common.

use counterpoint_exec::OpPlace;
use counterpoint_plan::DType;
use counterpoint_schedule::{self as schedule, BufferId, BufferSpec, RowBlock};

use super::{CallError, CudaTransport};
use crate::CudaError;
use crate::backend::CudaBuffer;
use crate::kernel::{ElementType, GemmLayout};

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
pub(super) fn element_of(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::Bf16 => Some(ElementType::Bf16),
        DType::F16 => Some(ElementType::F16),
        DType::F32 | DType::F64 => None,
    }
}

/// The layout of activations; gradients of weights do not travel.
pub(super) fn layout_of(layout: schedule::GemmLayout) -> Option<GemmLayout> {
    match layout {
        schedule::GemmLayout::Nt => Some(GemmLayout::Nt),
        schedule::GemmLayout::Nn => Some(GemmLayout::Nn),
        schedule::GemmLayout::Tn => None,
    }
}

/// Where blocks begin that follow each other in one buffer, and how many rows they have together.
pub(super) fn one_stretch(blocks: &[RowBlock], specs: &[BufferSpec]) -> Option<(Rows, usize)> {
    let first = blocks.first()?;
    let follows =
        |pair: &[RowBlock]| pair[0].buffer == pair[1].buffer && pair[0].rows.end == pair[1].rows.start;
    let spec = &specs[first.buffer.0];
    let offset = first.rows.start as u64 * (spec.row_elements() * spec.dtype.size()) as u64;
    let rows = blocks.iter().map(|block| block.rows.len()).sum();
    blocks.windows(2).all(follows).then_some((Rows { buffer: first.buffer, offset }, rows))
}

/// An operand that is the rows of one buffer.
pub(super) fn whole(blocks: &[RowBlock], specs: &[BufferSpec]) -> Option<Rows> {
    one_stretch(blocks, specs).map(|(rows, _)| rows)
}

impl CudaTransport {
    /// Whether memory that other ranks write is where they were told when they first met.
    pub(super) fn check_unmoved(&self, place: &OpPlace, told: u64, now: u64) -> Result<(), CallError> {
        if told == now {
            return Ok(());
        }
        let reason = "the other ranks write into its memory and know where that was when they first met; make the Program ready \
                      again to use other memory";
        Err(CudaError::Launch { kernel: place.to_string(), reason: reason.to_owned() }.into())
    }
}
