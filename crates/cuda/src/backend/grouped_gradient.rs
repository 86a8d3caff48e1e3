//! Gradients of all experts' weights as one grouped GEMM, whose problems are blocks of k.

use std::sync::Arc;

use counterpoint_exec::{ExecError, OperationFault};
use counterpoint_mask::Range;
use counterpoint_schedule::{
    Accumulate, BufferId, Gemm, RowBlock, RowBlocks, RowNumbers, RowPiece, WaveGemm,
};

use super::CudaBuffer;
use super::compute::Prepare;
use super::grouped::{GATHERED, GATHERED_TOO, GatheredRows};
use super::row_lists::{ListKey, buffers_of};
use crate::kernel::{
    GemmLayout, GemmProblem, GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, ProblemKBlock, ProblemRows,
    RowCopy, RowGather,
};
use crate::{CudaError, Stream};

/// Depth of a block of k.
const BLOCK: usize = 64;
/// The peer of zeros, until it is known how many tensors they come behind.
const ZEROS: u32 = u32::MAX;

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
    pub(super) fn new(
        prepare: &mut Prepare<'_>,
        op: &WaveGemm,
        products: &[Gemm],
    ) -> Result<Option<Self>, ExecError> {
        let first = &products[0];
        let columns = |id: BufferId| prepare.spec(id).row_elements();
        let (element, output) = (prepare.element(first.a.pieces()[0].buffer)?, prepare.scalar(first.out)?);
        let (m, n) = (columns(first.a.pieces()[0].buffer), columns(first.out));
        let strides = [m, columns(first.b.pieces()[0].buffer), n];
        let plain = |gemm: &Gemm| {
            gemm.out_rows.only().is_some() && gemm.bias.is_none() && gemm.accumulate == first.accumulate
        };
        if !prepare.setup().device().arch().is_hopper()
            || !GroupedGemmSpec::takes(GemmLayout::Tn, strides, 0, element, output)
            || !products.iter().all(plain)
        {
            return Ok(None);
        }
        let a: Vec<_> = products.iter().map(|gemm| &gemm.a).collect();
        let b: Vec<_> = products.iter().map(|gemm| &gemm.b).collect();
        let (a_blocks, b_blocks) = (prepare.blocks(op, &a)?, prepare.blocks(op, &b)?);
        let problem = |(index, gemm): (usize, &Gemm)| {
            let to = gemm.out_rows.only().unwrap_or_default();
            let rows = vec![ProblemRows { source: 0, first: 0, to: to.start, count: to.len() }];
            let places = a_blocks.places[index].iter().zip(&b_blocks.places[index]);
            let k_blocks = places.map(|(&a, &b)| ProblemKBlock { a, b }).collect();
            GemmProblem { rows, b_row: 0, k_blocks }
        };
        let spec = GroupedGemmSpec {
            n,
            k: 0,
            m,
            layout: GemmLayout::Tn,
            element,
            output,
            strides,
            rows_a: prepare.tensor_rows(&a_blocks, &a),
            rows_b: prepare.tensor_rows(&b_blocks, &b),
            rows_d: prepare.spec(first.out).rows(),
            adds: first.accumulate == Accumulate::Continue,
            problems: products.iter().enumerate().map(problem).collect(),
            sm_margin: prepare.sm_margin(),
            grid: prepare.grid(),
        };
        let gemm = GroupedGemm::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        let a = Operand::new(prepare, GATHERED, &a_blocks, &a)?;
        let b = Operand::new(prepare, GATHERED_TOO, &b_blocks, &b)?;
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
    fn new(
        prepare: &mut Prepare<'_>,
        name: &str,
        blocks: &PlacedBlocks,
        problems: &[&RowBlocks],
    ) -> Result<Self, ExecError> {
        let tensors = buffers_of(problems.iter().copied());
        let buffer = blocks.in_place.then_some(tensors[0]);
        let copied = match &blocks.copy {
            None => None,
            Some(copy) => {
                let rows = (blocks.copied_rows, BLOCK - 1);
                Some(GatheredRows::new(prepare, name, tensors, copy.clone(), rows)?)
            }
        };
        Ok(Self { buffer, copied })
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

/// Where the blocks of an operand lie, whatever it is multiplied with.
struct PlacedBlocks {
    /// Whether rows are as they lie, in one buffer, which is the blocks' first tensor then.
    in_place: bool,
    /// Of every problem, each block's tensor and first row.
    places: Vec<Vec<(usize, usize)>>,
    /// What copies rows, and to how many, which are another tensor.
    copy: Option<Arc<RowCopy>>,
    copied_rows: usize,
}

impl Prepare<'_> {
    /// Those of an operand of an operation. Tokens are in the same blocks in other passes of their routing.
    fn blocks(&self, op: &WaveGemm, problems: &[&RowBlocks]) -> Result<Arc<PlacedBlocks>, ExecError> {
        let first = problems[0].pieces()[0].buffer;
        let (scalar, columns) = (self.scalar(first)?, self.spec(first).row_elements());
        let place = |blocks: Blocks| -> Result<PlacedBlocks, CudaError> {
            let Blocks { buffer, places, gathers, copied_rows, .. } = blocks;
            let copy = (copied_rows > 0).then(|| GatheredRows::copy_of(self, (scalar, columns), &gathers));
            let (copy, in_place) = (copy.transpose()?, buffer.is_some());
            Ok(PlacedBlocks { in_place, places, copy, copied_rows })
        };
        if let Some((all, buffer)) = all_together(problems) {
            let placed = place(Blocks::in_place(&all, (buffer, self.spec(buffer).rows())));
            return placed.map(Arc::new).map_err(|error| self.device_error(error));
        }
        let make = || place(Blocks::copied(problems)).map(Some);
        let made = self.shared_list(&op.rows, ListKey::Blocks { columns, scalar }, make)?;
        made.ok_or_else(|| self.error(OperationFault::NoBlocks))
    }

    /// Rows of the blocks' tensors.
    fn tensor_rows(&self, blocks: &PlacedBlocks, problems: &[&RowBlocks]) -> Vec<usize> {
        let copied = Some(blocks.copied_rows).filter(|rows| *rows > 0);
        let in_place = blocks.in_place.then(|| self.spec(problems[0].pieces()[0].buffer).rows());
        in_place.into_iter().chain(copied).collect()
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
    gathers: Vec<RowGather>,
    copied_rows: usize,
}

impl Blocks {
    /// Those of problems whose rows lie together in a buffer, which has so many.
    fn in_place(problems: &[RowBlock], buffer: (BufferId, usize)) -> Self {
        let mut blocks = Self::new(Some(buffer), vec![buffer.0]);
        problems.iter().for_each(|of| blocks.add_in_place(of.rows, buffer.1));
        blocks.place_zeros();
        blocks
    }

    /// Those of problems whose rows are copied, of each the rows of these blocks one after the other.
    fn copied(problems: &[&RowBlocks]) -> Self {
        let mut blocks = Self::new(None, Vec::new());
        problems.iter().for_each(|of_problem| blocks.add_copied(of_problem));
        blocks.place_zeros();
        blocks
    }

    /// Zeros come from behind all tensors, whose number nobody knew before.
    fn place_zeros(&mut self) {
        let behind = self.tensors.len() as u32;
        self.gathers.iter_mut().filter(|rows| rows.peer == ZEROS).for_each(|zeros| zeros.peer = behind);
    }

    fn new(buffer: Option<(BufferId, usize)>, tensors: Vec<BufferId>) -> Self {
        Self { buffer, places: Vec::new(), tensors, gathers: Vec::new(), copied_rows: 0 }
    }

    /// A problem's rows as they lie; a last block that others follow is copied.
    fn add_in_place(&mut self, of_problem: Range, rows: usize) {
        let Range { start: first, end } = of_problem;
        let count = of_problem.len();
        let whole = if end == rows { count } else { count / BLOCK * BLOCK };
        let mut places: Vec<_> = (first..first + whole).step_by(BLOCK).map(|row| (0, row)).collect();
        if whole < count {
            places.push((1, self.copied_rows));
            self.copy(0, RowNumbers::Range(Range::new(first + whole, end)));
            self.end_copy();
        }
        self.places.push(places);
    }

    /// A problem's rows in the copy.
    fn add_copied(&mut self, rows: &RowBlocks) {
        let begin = self.copied_rows;
        for RowPiece { buffer, rows } in rows.pieces() {
            let tensor = self.tensor(*buffer) as u32;
            self.copy(tensor, rows.clone());
        }
        self.places.push((begin..self.copied_rows).step_by(BLOCK).map(|row| (0, row)).collect());
        self.end_copy();
    }

    /// Zeros up to the end of a block.
    fn end_copy(&mut self) {
        let zeros = self.copied_rows.next_multiple_of(BLOCK) - self.copied_rows;
        if zeros > 0 {
            self.copy(ZEROS, RowNumbers::Range(Range::new(0, zeros)));
        }
    }

    /// The number of a buffer among the tensors.
    fn tensor(&mut self, buffer: BufferId) -> usize {
        self.tensors.iter().position(|id| *id == buffer).unwrap_or_else(|| {
            self.tensors.push(buffer);
            self.tensors.len() - 1
        })
    }

    fn copy(&mut self, peer: u32, rows: RowNumbers) {
        let (to, count) = (self.copied_rows as u32, rows.count());
        self.gathers.push(RowGather { peer, rows, to });
        self.copied_rows += count;
    }
}

/// The rows of each problem where they lie together, in the same buffer all, and that buffer.
fn all_together(problems: &[&RowBlocks]) -> Option<(Vec<RowBlock>, BufferId)> {
    let all: Vec<RowBlock> = problems.iter().map(|rows| rows.together()).collect::<Option<_>>()?;
    let buffer = all.first()?.buffer;
    all.iter().all(|of| of.buffer == buffer).then_some((all, buffer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{RowStep, RowSteps};

    fn block(buffer: usize, start: usize, end: usize) -> RowBlock {
        RowBlock { buffer: BufferId(buffer), rows: Range::new(start, end) }
    }

    fn steps(blocks: &Blocks) -> Vec<RowStep> {
        let mut steps = Vec::new();
        blocks.gathers.each(|some| steps.extend_from_slice(some));
        steps
    }

    /// Experts of 100, 64, 3 and 70 rows of a buffer of 237.
    #[test]
    fn rows_stay_where_they_are_but_for_the_ends_of_problems() {
        let problems = [block(5, 0, 100), block(5, 100, 164), block(5, 164, 167), block(5, 167, 237)];
        let problems = problems.map(|block| RowBlocks::from(vec![block]));
        let problems: Vec<&RowBlocks> = problems.iter().collect();
        let (all, buffer) = all_together(&problems).unwrap();
        let blocks = Blocks::in_place(&all, (buffer, 237));
        let wanted: [&[(usize, usize)]; 4] =
            [&[(0, 0), (1, 0)], &[(0, 100)], &[(1, 64)], &[(0, 167), (0, 231)]];
        assert_eq!(blocks.places, wanted);
        let step = |peer, from, to, count| RowStep { peer, from, to, count };
        let wanted = [step(0, 64, 0, 36), step(1, 0, 36, 28), step(0, 164, 64, 3), step(1, 0, 67, 61)];
        assert_eq!(steps(&blocks), wanted);
        assert_eq!((blocks.buffer, blocks.copied_rows), (Some((BufferId(5), 237)), 128));
    }

    #[test]
    fn rows_that_come_one_by_one_are_copied_with_zeros_behind_each_problem() {
        let first: RowBlocks = (0..70).map(|row| block(row % 2, 3 * row, 3 * row + 1)).collect();
        let second = RowBlocks::from(vec![block(1, 300, 364)]);
        assert!(all_together(&[&first, &second]).is_none());
        let blocks = Blocks::copied(&[&first, &second]);
        assert_eq!(blocks.buffer, None);
        assert_eq!(blocks.places, [vec![(0, 0), (0, 64)], vec![(0, 128)]]);
        let steps = steps(&blocks);
        assert_eq!((steps.len(), blocks.copied_rows), (72, 192));
        let zeros = RowStep { peer: 2, from: 0, to: 70, count: 58 };
        assert_eq!((steps[70], steps[71].to, steps[71].count), (zeros, 128, 64));
    }
}
