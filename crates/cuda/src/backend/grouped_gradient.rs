//! Gradients of all experts' weights as one grouped GEMM, whose problems are blocks of k.

use counterpoint_exec::ExecError;
use counterpoint_mask::Range;
use counterpoint_schedule::{Accumulate, BufferId, Gemm, RowBlock};

use super::CudaBuffer;
use super::compute::Prepare;
use super::grouped::{GATHERED, GATHERED_TOO, GatheredRows, add_move};
use crate::kernel::{
    GemmLayout, GemmProblem, GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, ProblemRows, ProblemTerm,
    RowMove,
};
use crate::{CudaError, Stream};

/// Terms of a block of k.
const BLOCK: usize = 64;

/// The products.
pub(super) struct Gradients {
    a: Operand,
    b: Operand,
    gemm: GroupedGemm,
    out: BufferId,
}

/// The rows of an operand in blocks of k: those that lie together as they are, with a copy of each problem's last rows that others follow,
/// and any others in a copy in which zeros follow each problem's.
struct Operand {
    /// Where they lie, unless all are copied.
    buffer: Option<BufferId>,
    copied: Option<GatheredRows>,
}

impl Gradients {
    /// `None` where no kernel takes them.
    pub(super) fn new(prepare: &mut Prepare<'_>, products: &[Gemm]) -> Result<Option<Self>, ExecError> {
        let first = &products[0];
        let columns = |id: BufferId| prepare.spec(id).row_elements();
        let (element, output) = (prepare.element(first.a[0].buffer)?, prepare.scalar(first.out)?);
        let (m, n) = (columns(first.a[0].buffer), columns(first.out));
        let strides = [m, columns(first.b[0].buffer), n];
        let plain = |gemm: &Gemm| {
            gemm.out_rows.len() == 1 && gemm.bias.is_none() && gemm.accumulate == first.accumulate
        };
        if !prepare.setup().device().arch().is_hopper()
            || !GroupedGemmSpec::takes(GemmLayout::Tn, strides, 0, element, output)
            || !products.iter().all(plain)
        {
            return Ok(None);
        }
        let a: Vec<_> = products.iter().map(|gemm| gemm.a.as_slice()).collect();
        let b: Vec<_> = products.iter().map(|gemm| gemm.b.as_slice()).collect();
        let (a_blocks, b_blocks) =
            (Blocks::of(&a, |id| prepare.spec(id).rows()), Blocks::of(&b, |id| prepare.spec(id).rows()));
        let problem = |(index, gemm): (usize, &Gemm)| {
            let to = gemm.out_rows[0];
            let rows = vec![ProblemRows { source: 0, first: 0, to: to.start, count: to.len() }];
            let places = a_blocks.places[index].iter().zip(&b_blocks.places[index]);
            let terms = places.map(|(&a, &b)| ProblemTerm { a, b }).collect();
            GemmProblem { rows, b_row: 0, terms }
        };
        let spec = GroupedGemmSpec {
            n,
            k: 0,
            m,
            layout: GemmLayout::Tn,
            element,
            output,
            strides,
            rows_a: a_blocks.tensor_rows(),
            rows_b: b_blocks.tensor_rows(),
            rows_d: prepare.spec(first.out).rows(),
            adds: first.accumulate == Accumulate::Continue,
            problems: products.iter().enumerate().map(problem).collect(),
            sm_margin: prepare.sm_margin(),
            grid: prepare.grid(),
        };
        let gemm = GroupedGemm::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        let (a, b) =
            (Operand::new(prepare, GATHERED, a_blocks)?, Operand::new(prepare, GATHERED_TOO, b_blocks)?);
        Ok(Some(Self { a, b, gemm, out: first.out }))
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let (a, b) = (self.a.enter(stream, buffers)?, self.b.enter(stream, buffers)?);
        let tensors = GroupedGemmTensors { a: &a, b: &b, d: buffers[self.out.0].address() };
        // SAFETY: `check_operands` has compared all shapes and types; buffers and copies live as long as what is enqueued; the Program
        // orders who else uses them.
        unsafe { self.gemm.launch(stream, &tensors) }
    }
}

impl Operand {
    fn new(prepare: &mut Prepare<'_>, name: &str, blocks: Blocks) -> Result<Self, ExecError> {
        let Blocks { buffer, tensors, moves, copied_rows, .. } = blocks;
        let copied = match copied_rows {
            0 => None,
            rows => Some(GatheredRows::new(prepare, name, tensors, &moves, (rows, BLOCK - 1))?),
        };
        Ok(Self { buffer: buffer.map(|(id, _)| id), copied })
    }

    /// Copies what is copied, and says where the tensors of the blocks begin.
    fn enter(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<Vec<u64>, CudaError> {
        let mut tensors: Vec<u64> = self.buffer.iter().map(|id| buffers[id.0].address()).collect();
        if let Some(copied) = &self.copied {
            copied.launch(stream, buffers)?;
            tensors.push(copied.address(buffers));
        }
        Ok(tensors)
    }
}

/// Where the blocks of an operand lie.
struct Blocks {
    /// Where rows lie as they are, and how many it has: the blocks' first tensor.
    buffer: Option<(BufferId, usize)>,
    /// Of every problem, each block's tensor and first row.
    places: Vec<Vec<(usize, usize)>>,
    /// What is copied: from where, which rows, and to how many, which are another tensor.
    tensors: Vec<BufferId>,
    moves: Vec<RowMove>,
    copied_rows: usize,
}

impl Blocks {
    /// Those of some problems, of each the rows of these blocks one after the other; `rows_of` says how many a buffer has.
    fn of(problems: &[&[RowBlock]], rows_of: impl Fn(BufferId) -> usize) -> Self {
        let together: Option<Vec<RowBlock>> = problems.iter().map(|blocks| together(blocks)).collect();
        let together = together.filter(|all| all.windows(2).all(|pair| pair[0].buffer == pair[1].buffer));
        let buffer = together.as_ref().and_then(|all| all.first()).map(|first| first.buffer);
        let buffer = buffer.map(|id| (id, rows_of(id)));
        let tensors = buffer.map_or_else(|| tensors_of(problems), |(id, _)| vec![id]);
        let places = Vec::with_capacity(problems.len());
        let mut blocks = Self { buffer, places, tensors, moves: Vec::new(), copied_rows: 0 };
        match (together, buffer) {
            (Some(all), Some((_, rows))) => all.iter().for_each(|of| blocks.add_in_place(of.rows, rows)),
            _ => problems.iter().for_each(|of_problem| blocks.add_copied(of_problem)),
        }
        blocks
    }

    /// A problem's rows as they lie; a last block that others follow is copied.
    fn add_in_place(&mut self, of_problem: Range, rows: usize) {
        let Range { start: first, end } = of_problem;
        let count = of_problem.len();
        let whole = if end == rows { count } else { count / BLOCK * BLOCK };
        let mut places: Vec<_> = (first..first + whole).step_by(BLOCK).map(|row| (0, row)).collect();
        if whole < count {
            places.push((1, self.copied_rows));
            self.copy(0, Range::new(first + whole, end));
            self.end_copy();
        }
        self.places.push(places);
    }

    /// A problem's rows in the copy.
    fn add_copied(&mut self, blocks: &[RowBlock]) {
        let begin = self.copied_rows;
        self.moves.reserve(blocks.len() + 1);
        for block in blocks {
            let tensor = self.tensors.iter().position(|id| *id == block.buffer).unwrap_or(0);
            self.copy(tensor, block.rows);
        }
        self.places.push((begin..self.copied_rows).step_by(BLOCK).map(|row| (0, row)).collect());
        self.end_copy();
    }

    /// Zeros up to the end of a block.
    fn end_copy(&mut self) {
        let zeros = self.copied_rows.next_multiple_of(BLOCK) - self.copied_rows;
        if zeros > 0 {
            self.copy(self.tensors.len(), Range::new(0, zeros));
        }
    }

    fn copy(&mut self, peer: usize, from: Range) {
        let to = Range::new(self.copied_rows, self.copied_rows + from.len());
        add_move(&mut self.moves, RowMove { peer, from, to });
        self.copied_rows = to.end;
    }

    /// Rows of the blocks' tensors.
    fn tensor_rows(&self) -> Vec<usize> {
        let copied = Some(self.copied_rows).filter(|rows| *rows > 0);
        self.buffer.map(|(_, rows)| rows).into_iter().chain(copied).collect()
    }
}

/// Blocks that follow each other, as one; `None` where they do not.
fn together(blocks: &[RowBlock]) -> Option<RowBlock> {
    let (first, last) = (blocks.first()?, blocks.last()?);
    let follows =
        |pair: &[RowBlock]| pair[0].buffer == pair[1].buffer && pair[0].rows.end == pair[1].rows.start;
    let rows = Range { start: first.rows.start, end: last.rows.end };
    blocks.windows(2).all(follows).then_some(RowBlock { buffer: first.buffer, rows })
}

/// The buffers of some blocks, in the order in which they come.
fn tensors_of(problems: &[&[RowBlock]]) -> Vec<BufferId> {
    let mut tensors: Vec<BufferId> = Vec::new();
    for block in problems.iter().copied().flatten() {
        if !tensors.contains(&block.buffer) {
            tensors.push(block.buffer);
        }
    }
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(buffer: usize, start: usize, end: usize) -> RowBlock {
        RowBlock { buffer: BufferId(buffer), rows: Range::new(start, end) }
    }

    /// Experts of 100, 64, 3 and 70 rows of a buffer of 237.
    #[test]
    fn rows_stay_where_they_are_but_for_the_ends_of_problems() {
        let problems = [[block(5, 0, 100)], [block(5, 100, 164)], [block(5, 164, 167)], [block(5, 167, 237)]];
        let problems: Vec<&[RowBlock]> = problems.iter().map(|blocks| &blocks[..]).collect();
        let blocks = Blocks::of(&problems, |_| 237);
        let wanted: [&[(usize, usize)]; 4] =
            [&[(0, 0), (1, 0)], &[(0, 100)], &[(1, 64)], &[(0, 167), (0, 231)]];
        assert_eq!(blocks.places, wanted);
        let step = |peer: usize, from: usize, to: usize, count: usize| RowMove {
            peer,
            from: Range::new(from, from + count),
            to: Range::new(to, to + count),
        };
        let wanted = [step(0, 64, 0, 36), step(1, 0, 36, 28), step(0, 164, 64, 3), step(1, 0, 67, 61)];
        assert_eq!(blocks.moves, wanted);
        assert_eq!(blocks.tensor_rows(), [237, 128]);
    }

    #[test]
    fn rows_that_come_one_by_one_are_copied_with_zeros_behind_each_problem() {
        let first: Vec<RowBlock> = (0..70).map(|row| block(row % 2, 3 * row, 3 * row + 1)).collect();
        let second = [block(1, 300, 364)];
        let blocks = Blocks::of(&[&first, &second], |_| 1000);
        assert_eq!(blocks.buffer, None);
        assert_eq!(blocks.places, [vec![(0, 0), (0, 64)], vec![(0, 128)]]);
        assert_eq!((blocks.moves.len(), blocks.tensor_rows()), (72, vec![192]));
        let zeros = RowMove { peer: 2, from: Range::new(0, 58), to: Range::new(70, 128) };
        assert_eq!((blocks.moves[70], blocks.moves[71].to), (zeros, Range::new(128, 192)));
    }
}
