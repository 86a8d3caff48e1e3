//! Rows of a Program's buffers as matrices that kernels take: as they lie, or in a copy where that is not possible.

use counterpoint_exec::ExecError;
use counterpoint_mask::Range;
use counterpoint_schedule::{Accumulate, BufferId, RowBlock};

use super::CudaBuffer;
use super::compute::Prepare;
use crate::kernel::{GemmRows, HeadResize, Scalar};
use crate::{CudaError, DeviceBuffer, Stream};

/// Bytes of which rows must be multiples.
const ALIGNMENT: usize = 16;

/// The buffers of `blocks`, and the rows of them one after the other; neighbours are one piece.
pub(super) fn tensors_of(blocks: &[RowBlock]) -> (Vec<BufferId>, Vec<GemmRows>) {
    let mut tensors: Vec<BufferId> = Vec::new();
    let mut rows: Vec<GemmRows> = Vec::new();
    for block in blocks {
        let tensor = tensors.iter().position(|id| *id == block.buffer).unwrap_or_else(|| {
            tensors.push(block.buffer);
            tensors.len() - 1
        });
        match rows.last_mut() {
            Some(last) if last.tensor == tensor && last.first + last.count == block.rows.start => {
                last.count += block.rows.len();
            }
            _ => rows.push(GemmRows { tensor, first: block.rows.start, count: block.rows.len() }),
        }
    }
    (tensors, rows)
}

/// An operand.
pub(super) struct SourceRows {
    tensors: Vec<BufferId>,
    /// As a kernel is told of them.
    rows: Vec<GemmRows>,
    columns: usize,
    stride: usize,
    bytes: usize,
    copy: Option<RowsCopy>,
}

/// All rows of an operand, one after the other, with rows of another length.
struct RowsCopy {
    memory: DeviceBuffer,
    resize: HeadResize,
    /// As they lie in the Program's buffers.
    rows: Vec<GemmRows>,
}

impl SourceRows {
    /// The rows of `blocks`, which are copied unless a kernel takes them as they lie.
    pub(super) fn new(
        prepare: &Prepare<'_>,
        blocks: &[RowBlock],
        fit: impl FnOnce(&[GemmRows]) -> bool,
    ) -> Result<Self, ExecError> {
        let spec = prepare.spec(blocks[0].buffer);
        let (columns, bytes) = (spec.row_elements(), spec.dtype.size());
        let stride = padded(columns, bytes);
        let (tensors, rows) = tensors_of(blocks);
        if stride == columns && fit(&rows) {
            return Ok(Self { tensors, rows, columns, stride, bytes, copy: None });
        }
        let count = rows.iter().map(|piece| piece.count).sum();
        let copy = prepare.rows_copy(count, stride, bytes)?;
        let copy = Some(RowsCopy { memory: copy.0, resize: copy.1, rows });
        let rows = vec![GemmRows { tensor: 0, first: 0, count }];
        Ok(Self { tensors, rows, columns, stride, bytes, copy })
    }

    pub(super) fn rows(&self) -> &[GemmRows] {
        &self.rows
    }

    pub(super) fn count(&self) -> usize {
        self.rows.iter().map(|piece| piece.count).sum()
    }

    /// Elements from one row to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// How many addresses there are.
    pub(super) fn tensors(&self) -> usize {
        if self.copy.is_some() { 1 } else { self.tensors.len() }
    }

    /// Before a kernel that reads them.
    pub(super) fn enter(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let Some(RowsCopy { memory, resize, rows }) = &self.copy else { return Ok(()) };
        let mut row = 0;
        for piece in rows {
            let from = buffers[self.tensors[piece.tensor].0].memory();
            let of = |row: usize, stride: usize| row * stride * self.bytes;
            if self.stride == self.columns {
                let from =
                    from.slice(of(piece.first, self.columns)..of(piece.first + piece.count, self.columns))?;
                memory.copy_from(stream, of(row, self.stride), &from)?;
            } else {
                let from = from.address() + of(piece.first, self.columns) as u64;
                let to = memory.address() + of(row, self.stride) as u64;
                let lengths = (self.columns as u32, self.stride as u32);
                // SAFETY: `check_operands` has compared the rows with the buffer's, the copy has room for all; the Program
                // orders who else uses the buffer.
                unsafe { resize.launch(stream, from, to, piece.count as u64, lengths) }?;
            }
            row += piece.count;
        }
        Ok(())
    }

    /// Where each tensor begins.
    pub(super) fn addresses(&self, buffers: &[CudaBuffer]) -> Vec<u64> {
        match &self.copy {
            Some(copy) => vec![copy.memory.address()],
            None => self.tensors.iter().map(|id| buffers[id.0].address()).collect(),
        }
    }

    /// Where the first row lies.
    pub(super) fn first_row(&self, buffers: &[CudaBuffer]) -> u64 {
        let first = self.rows[0];
        self.addresses(buffers)[first.tensor] + (first.first * self.stride * self.bytes) as u64
    }
}

/// A result.
pub(super) struct ResultRows {
    buffer: BufferId,
    scalar: Scalar,
    columns: usize,
    stride: usize,
    /// As a kernel is told of them.
    rows: Vec<Range>,
    /// A copy of the rows, one after the other, with where they belong, and whether it begins as they are.
    copy: Option<(DeviceBuffer, HeadResize, Vec<Range>, Accumulate)>,
}

impl ResultRows {
    /// `rows` of `buffer`, which are copied unless a kernel writes them where they belong.
    pub(super) fn new(
        prepare: &Prepare<'_>,
        buffer: BufferId,
        rows: &[Range],
        accumulate: Accumulate,
        fit: impl FnOnce(&[Range]) -> bool,
    ) -> Result<Self, ExecError> {
        let spec = prepare.spec(buffer);
        let (columns, bytes) = (spec.row_elements(), spec.dtype.size());
        let (scalar, stride) = (prepare.scalar(buffer)?, padded(columns, bytes));
        if stride == columns && fit(rows) {
            return Ok(Self { buffer, scalar, columns, stride, rows: rows.to_vec(), copy: None });
        }
        let count = rows.iter().map(Range::len).sum();
        let (memory, resize) = prepare.rows_copy(count, stride, bytes)?;
        let copy = Some((memory, resize, rows.to_vec(), accumulate));
        Ok(Self { buffer, scalar, columns, stride, rows: vec![Range::new(0, count)], copy })
    }

    pub(super) fn rows(&self) -> &[Range] {
        &self.rows
    }

    /// Elements from one row to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn scalar(&self) -> Scalar {
        self.scalar
    }

    /// Where a row lies that a kernel was told of.
    pub(super) fn address(&self, buffers: &[CudaBuffer], row: usize) -> u64 {
        let begin =
            self.copy.as_ref().map_or_else(|| buffers[self.buffer.0].address(), |copy| copy.0.address());
        begin + self.bytes(row, self.stride)
    }

    fn bytes(&self, row: usize, stride: usize) -> u64 {
        (row * stride) as u64 * self.scalar.bytes()
    }

    /// Before a kernel that writes or adds to them.
    pub(super) fn enter(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        match &self.copy {
            Some((.., Accumulate::Continue)) => self.resize(stream, buffers, true),
            _ => Ok(()),
        }
    }

    /// After it.
    pub(super) fn leave(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        self.resize(stream, buffers, false)
    }

    fn resize(&self, stream: &Stream, buffers: &[CudaBuffer], enters: bool) -> Result<(), CudaError> {
        let Some((memory, resize, rows, _)) = &self.copy else { return Ok(()) };
        let mut row = 0;
        for range in rows {
            let there = buffers[self.buffer.0].address() + self.bytes(range.start, self.columns);
            let here = memory.address() + self.bytes(row, self.stride);
            let (columns, stride) = (self.columns as u32, self.stride as u32);
            let (from, to, lengths) =
                if enters { (there, here, (columns, stride)) } else { (here, there, (stride, columns)) };
            // SAFETY: `check_operands` has compared the rows with the buffer's, the copy has room for all; the Program orders
            // who else uses the buffer.
            unsafe { resize.launch(stream, from, to, range.len() as u64, lengths) }?;
            row += range.len();
        }
        Ok(())
    }
}

/// Elements of a row with room to its end.
fn padded(columns: usize, bytes: usize) -> usize {
    columns.next_multiple_of(ALIGNMENT / bytes)
}

impl Prepare<'_> {
    fn rows_copy(
        &self,
        rows: usize,
        stride: usize,
        bytes: usize,
    ) -> Result<(DeviceBuffer, HeadResize), ExecError> {
        let device = self.setup().device();
        let memory = DeviceBuffer::new(device, rows * stride * bytes);
        let resize = HeadResize::new(device, bytes as u64);
        memory
            .and_then(|memory| resize.map(|resize| (memory, resize)))
            .map_err(|error| self.device_error(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_piece() {
        let block = |buffer, start, end| RowBlock { buffer: BufferId(buffer), rows: Range::new(start, end) };
        let (tensors, rows) =
            tensors_of(&[block(4, 0, 5), block(4, 5, 9), block(2, 9, 10), block(4, 10, 12)]);
        assert_eq!(tensors, [BufferId(4), BufferId(2)]);
        let wanted = [(0, 0, 9), (1, 9, 1), (0, 10, 2)];
        assert_eq!(rows, wanted.map(|(tensor, first, count)| GemmRows { tensor, first, count }));
    }
}
