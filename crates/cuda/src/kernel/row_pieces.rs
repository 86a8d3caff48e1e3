//! Rows that are those of several tensors, piece after piece: what kernels that undo the order of travel are given.

use bytemuck::NoUninit;

use super::{GemmRows, RowsFault};
use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, DeviceBuffer, Stream};

/// Tensors of one launch (`kRowSources`).
const SOURCES: usize = 256;
/// Elements that kernels load at once where they can.
pub(super) const PACK: usize = 8;

/// Elements that kernels load at once from rows of so many.
pub(super) const fn pack_of(columns: usize) -> usize {
    if columns.is_multiple_of(PACK) { PACK } else { 1 }
}

/// `RowSources` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RowSources {
    at: [u64; SOURCES],
}

/// `RowPiece` of the kernels.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct RowPiece {
    source: u32,
    first: u32,
    begin: u32,
    end: u32,
}

/// The list of pieces on the device.
#[derive(Clone, Debug)]
pub(super) struct RowPieces {
    kernel: &'static str,
    pieces: DeviceBuffer,
    tensors: usize,
    /// Number of pieces.
    pub(super) count: u32,
    /// Rows of all pieces.
    pub(super) rows: u32,
    /// Elements of a row.
    pub(super) columns: u32,
}

impl RowPieces {
    /// Uploads the list by `stream`, which is waited for. Errors name `kernel`.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for more tensors or rows than a kernel takes; when memory is short.
    pub(super) fn new(
        stream: &Stream,
        kernel: &'static str,
        rows: &[GemmRows],
        columns: usize,
    ) -> Result<Self, CudaError> {
        let refused =
            |fault: RowsFault| CudaError::Launch { kernel: kernel.to_owned(), reason: fault.into() };
        let count: usize = rows.iter().map(|piece| piece.count).sum();
        let tensors = rows.iter().map(|piece| piece.tensor + 1).max().unwrap_or(0);
        let (Ok(row_count), Ok(column_count)) = (u32::try_from(count), u32::try_from(columns)) else {
            return Err(refused(RowsFault::Shape { rows: count, columns }));
        };
        if tensors > SOURCES {
            return Err(refused(RowsFault::RowTensors { tensors, most: SOURCES }));
        }
        let mut begin = 0;
        let pieces = rows.iter().map(|piece| {
            let end = begin + piece.count as u32;
            let (source, first) = (piece.tensor as u32, piece.first as u32);
            RowPiece { source, first, begin: std::mem::replace(&mut begin, end), end }
        });
        let pieces: Vec<RowPiece> = pieces.collect();
        Ok(Self {
            kernel,
            pieces: DeviceBuffer::from_slice(stream, &pieces)?,
            tensors,
            count: pieces.len() as u32,
            rows: row_count,
            columns: column_count,
        })
    }

    /// Where the list lies.
    pub(super) fn address(&self) -> u64 {
        self.pieces.address()
    }

    /// The tensors of a launch.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for too many or few addresses.
    pub(super) fn sources(&self, tensors: &[u64]) -> Result<RowSources, CudaError> {
        if tensors.len() != self.tensors {
            let reason = RowsFault::Addresses { given: tensors.len(), tensors: self.tensors }.into();
            return Err(CudaError::Launch { kernel: self.kernel.to_owned(), reason });
        }
        let mut sources = RowSources { at: [0; SOURCES] };
        sources.at[..tensors.len()].copy_from_slice(tensors);
        Ok(sources)
    }
}

/// Types that the kernels share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("row_pieces.cuh", RowSources { at }),
        shared_layout!("row_pieces.cuh", RowPiece { source, first, begin, end }),
    ]
}
