//! Rows of a Program's buffers as matrices that kernels take: as they lie, or in a copy where that is not possible.

use counterpoint_exec::ExecError;
use counterpoint_mask::Range;
use counterpoint_schedule::{Accumulate, BufferId, RowBlock, RowBlocks};

use super::CudaBuffer;
use super::compute::Prepare;
use crate::kernel::{GemmRows, HeadResize, RowCopy, RowCopyTensor, RowMove, Scalar, StartMark};
use crate::{CudaError, DeviceBuffer, Stream};

/// Bytes of which rows must be multiples.
const ALIGNMENT: usize = 16;

/// The buffers of `blocks`, and the rows of them one after the other; neighbours are one piece.
pub(super) fn tensors_of(blocks: impl Iterator<Item = RowBlock>) -> (Vec<BufferId>, Vec<GemmRows>) {
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
    /// As a kernel is given them.
    rows: Vec<GemmRows>,
    columns: usize,
    stride: usize,
    bytes: usize,
    copy: Option<RowsCopy>,
}

/// All rows of an operand or a result, one after the other.
struct RowsCopy {
    memory: DeviceBuffer,
    /// As they lie in the Program's buffers.
    rows: Vec<GemmRows>,
    copying: Copying,
}

/// What copies rows to where they lie together, and back.
enum Copying {
    /// All of them by one launch, in each direction that is needed.
    Together { gather: Option<RowCopy>, scatter: Option<RowCopy> },
    /// Range by range, whose rows are there longer than they are.
    Resized(HeadResize),
}

impl SourceRows {
    /// The rows of `blocks`, which are copied unless a kernel takes them as they lie.
    pub(super) fn new(
        prepare: &Prepare<'_>,
        blocks: &RowBlocks,
        fit: impl FnOnce(&[GemmRows]) -> bool,
    ) -> Result<Self, ExecError> {
        let first = blocks.pieces()[0].buffer;
        let spec = prepare.spec(first);
        let (columns, bytes) = (spec.row_elements(), spec.dtype.size());
        let stride = padded(columns, bytes);
        let (tensors, rows) = tensors_of(blocks.iter());
        if stride == columns && fit(&rows) {
            return Ok(Self { tensors, rows, columns, stride, bytes, copy: None });
        }
        let count = rows.iter().map(|piece| piece.count).sum();
        let scalar = prepare.scalar(first)?;
        let copy = Some(prepare.rows_copy(scalar, (columns, stride), rows, &[Direction::Gather])?);
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

    /// Whether a kernel takes a copy of them, which is made before it.
    pub(super) fn is_copied(&self) -> bool {
        self.copy.is_some()
    }

    /// How many addresses there are.
    pub(super) fn tensors(&self) -> usize {
        if self.copy.is_some() { 1 } else { self.tensors.len() }
    }

    /// Before a kernel that reads them.
    pub(super) fn enter(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let tensors: Vec<u64> = self.tensors.iter().map(|id| buffers[id.0].address()).collect();
        copy.run(stream, &tensors, (self.columns, self.stride, self.bytes), Direction::Gather)
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
    /// As a kernel is given them.
    rows: Vec<Range>,
    /// A copy of the rows, and whether it begins as they are.
    copy: Option<(RowsCopy, Accumulate)>,
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
        let of = |rows: &Range| GemmRows { tensor: 0, first: rows.start, count: rows.len() };
        let there = rows.iter().map(of).collect();
        let directions = match accumulate {
            Accumulate::Start => &[Direction::Scatter][..],
            Accumulate::Continue => &[Direction::Gather, Direction::Scatter],
        };
        let copy = Some((prepare.rows_copy(scalar, (columns, stride), there, directions)?, accumulate));
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

    /// Where a row lies that a kernel was given.
    pub(super) fn address(&self, buffers: &[CudaBuffer], row: usize) -> u64 {
        let begin = match &self.copy {
            Some((copy, _)) => copy.memory.address(),
            None => buffers[self.buffer.0].address(),
        };
        begin + self.bytes(row, self.stride)
    }

    fn bytes(&self, row: usize, stride: usize) -> u64 {
        (row * stride) as u64 * self.scalar.bytes()
    }

    /// Before a kernel that writes or adds to them.
    pub(super) fn enter(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        match &self.copy {
            Some((copy, Accumulate::Continue)) => self.copied(copy, stream, buffers, Direction::Gather),
            _ => Ok(()),
        }
    }

    /// After it.
    pub(super) fn leave(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        match &self.copy {
            Some((copy, _)) => self.copied(copy, stream, buffers, Direction::Scatter),
            None => Ok(()),
        }
    }

    fn copied(
        &self,
        copy: &RowsCopy,
        stream: &Stream,
        buffers: &[CudaBuffer],
        direction: Direction,
    ) -> Result<(), CudaError> {
        let (there, bytes) = (buffers[self.buffer.0].address(), self.scalar.bytes() as usize);
        copy.run(stream, &[there], (self.columns, self.stride, bytes), direction)
    }
}

/// Where rows are copied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// To where they lie together.
    Gather,
    /// Back.
    Scatter,
}

impl RowsCopy {
    /// Enqueues it, between the Program's buffers, which begin at `tensors`, and its own memory; with the elements of a row there, from
    /// one to the next here, and an element's bytes.
    fn run(
        &self,
        stream: &Stream,
        tensors: &[u64],
        (columns, stride, bytes): (usize, usize, usize),
        direction: Direction,
    ) -> Result<(), CudaError> {
        let here = self.memory.address();
        // SAFETY: `check_operands` has compared the rows with the buffers', the copy has room for all; the Program orders who else uses
        // the buffers.
        unsafe {
            match (&self.copying, direction) {
                (Copying::Together { gather, .. }, Direction::Gather) => {
                    gather.iter().try_for_each(|gather| {
                        gather.launch(stream, |tensor, _| tensors[tensor], &[here], &StartMark::none())
                    })
                }
                (Copying::Together { scatter, .. }, Direction::Scatter) => scatter
                    .iter()
                    .try_for_each(|scatter| scatter.launch(stream, |_, _| here, tensors, &StartMark::none())),
                (Copying::Resized(resize), _) => {
                    let mut row = 0;
                    self.rows.iter().try_for_each(|piece| {
                        let there = tensors[piece.tensor] + (piece.first * columns * bytes) as u64;
                        let here = here + (row * stride * bytes) as u64;
                        row += piece.count;
                        let (columns, stride) = (columns as u32, stride as u32);
                        let (from, to, lengths) = match direction {
                            Direction::Gather => (there, here, (columns, stride)),
                            Direction::Scatter => (here, there, (stride, columns)),
                        };
                        resize.launch(stream, from, to, piece.count as u64, lengths)
                    })
                }
            }
        }
    }
}

/// Elements of a row with room to its end.
fn padded(columns: usize, bytes: usize) -> usize {
    columns.next_multiple_of(ALIGNMENT / bytes)
}

impl Prepare<'_> {
    /// Memory for `rows` of these many elements, and of so many from one to the next there, and what copies them in these `directions`.
    fn rows_copy(
        &self,
        scalar: Scalar,
        (columns, stride): (usize, usize),
        rows: Vec<GemmRows>,
        directions: &[Direction],
    ) -> Result<RowsCopy, ExecError> {
        let make = || -> Result<RowsCopy, CudaError> {
            let (setup, bytes) = (self.setup(), scalar.bytes());
            let count: usize = rows.iter().map(|piece| piece.count).sum();
            let memory = DeviceBuffer::new(setup.device(), count * stride * bytes as usize)?;
            let copying = if stride == columns {
                let tensor = RowCopyTensor { scalar, row_elements: columns as u64, wire: scalar };
                let copy = |direction: Direction| {
                    let moves = || RowCopy::new(setup, &[tensor], &moves(&rows, direction));
                    directions.contains(&direction).then(moves).transpose()
                };
                Copying::Together { gather: copy(Direction::Gather)?, scatter: copy(Direction::Scatter)? }
            } else {
                Copying::Resized(HeadResize::new(setup.device(), bytes)?)
            };
            Ok(RowsCopy { memory, rows, copying })
        };
        make().map_err(|error| self.device_error(error))
    }
}

/// Rows of several tensors to where they lie one after the other, or those of one back from there.
fn moves(rows: &[GemmRows], direction: Direction) -> Vec<RowMove> {
    let mut next = 0;
    let step = |&GemmRows { tensor, first, count }: &GemmRows| {
        let (there, here) = (Range::new(first, first + count), Range::new(next, next + count));
        next += count;
        match direction {
            Direction::Gather => RowMove { peer: tensor, from: there, to: here },
            Direction::Scatter => RowMove { peer: 0, from: here, to: there },
        }
    };
    rows.iter().map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_gathered_one_after_the_other_and_go_back() {
        let rows = [(1, 7, 2), (0, 3, 1), (1, 9, 4)];
        let rows = rows.map(|(tensor, first, count)| GemmRows { tensor, first, count });
        let step = |peer, from: usize, to: usize, count: usize| RowMove {
            peer,
            from: Range::new(from, from + count),
            to: Range::new(to, to + count),
        };
        assert_eq!(moves(&rows, Direction::Gather), [step(1, 7, 0, 2), step(0, 3, 2, 1), step(1, 9, 3, 4)]);
        assert_eq!(moves(&rows[1..2], Direction::Scatter), [step(0, 0, 3, 1)]);
    }

    #[test]
    fn neighbours_are_one_piece() {
        let block = |buffer, start, end| RowBlock { buffer: BufferId(buffer), rows: Range::new(start, end) };
        let (tensors, rows) =
            tensors_of([block(4, 0, 5), block(4, 5, 9), block(2, 9, 10), block(4, 10, 12)].into_iter());
        assert_eq!(tensors, [BufferId(4), BufferId(2)]);
        let wanted = [(0, 0, 9), (1, 9, 1), (0, 10, 2)];
        assert_eq!(rows, wanted.map(|(tensor, first, count)| GemmRows { tensor, first, count }));
    }
}
