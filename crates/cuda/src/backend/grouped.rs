//! Grouped GEMMs of a Program: the products of all experts as one launch for each result, with one copy of the rows that it cannot take as
//! they lie.

use counterpoint_exec::ExecError;
use counterpoint_mask::Range;
use counterpoint_schedule::{
    self as schedule, Accumulate, BufferId, GemmLayout, GroupedLaunch, GroupedProblem, GroupedResults,
    GroupedRows, ReduceOp, SignalId, WaveGemm,
};

use super::compute::Prepare;
use super::grouped_gradient::Gradients;
use super::linear::Product;
use super::{CudaBuffer, CudaSignal};
use crate::kernel::{
    GemmProblem, GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, ProblemRows, ReduceTypes, RowCopy,
    RowCopyTensor, RowMove, RowReduce, RowReduceSpec, Scalar, StartMark,
};
use crate::{CudaError, DeviceBuffer, Stream};

/// The products.
pub(super) struct Grouped {
    launches: Vec<Launch>,
    /// Where anyone waits for it.
    signal: Option<SignalId>,
}

/// Those of one result, and the signal's value behind them.
struct Launch {
    work: Work,
    value: u64,
}

enum Work {
    /// Where the kernel does not take their rows: one after the other.
    Apart(Vec<Product>),
    Rows(Box<Rows>),
    Gradients(Box<Gradients>),
}

impl Grouped {
    pub(super) fn new(prepare: &mut Prepare<'_>, op: &WaveGemm) -> Result<Self, ExecError> {
        let mut launches = Vec::new();
        for launch in GroupedLaunch::of(&op.groups) {
            let products = &op.groups[launch.products.clone()];
            let value = launch.products.end as u64;
            let made = match products[0].layout {
                GemmLayout::Tn => {
                    Gradients::new(prepare, products)?.map(|work| Work::Gradients(Box::new(work)))
                }
                GemmLayout::Nt | GemmLayout::Nn => {
                    Rows::new(prepare, &op.groups, &launch)?.map(|work| Work::Rows(Box::new(work)))
                }
            };
            let apart = || products.iter().map(|gemm| Product::new(prepare, gemm)).collect::<Result<_, _>>();
            let work = match made {
                Some(work) => work,
                None => Work::Apart(apart()?),
            };
            launches.push(Launch { work, value });
        }
        let signal = Some(op.signal).filter(|signal| prepare.is_waited_for(*signal));
        Ok(Self { launches, signal })
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signals: &[CudaSignal],
    ) -> Result<(), CudaError> {
        self.launches.iter().try_for_each(|Launch { work, value }| {
            match work {
                Work::Apart(products) => {
                    products.iter().try_for_each(|product| product.launch(stream, buffers))?
                }
                Work::Rows(rows) => rows.launch(stream, buffers)?,
                Work::Gradients(gradients) => gradients.launch(stream, buffers)?,
            }
            self.signal.map_or(Ok(()), |signal| signals[signal.0].raise(stream, *value))
        })
    }
}

/// Scratch memory for the rows of a first operand that lie together, and of a second one beside it.
pub(super) const GATHERED: &str = "rows together";
pub(super) const GATHERED_TOO: &str = "more rows together";
/// Scratch memory for results on their way to where they belong.
const RESULTS: &str = "results together";

/// Rows that one launch copies to where they lie together.
pub(super) struct GatheredRows {
    memory: BufferId,
    tensors: Vec<BufferId>,
    /// What moves of the peer behind all tensors come from.
    zeros: Option<DeviceBuffer>,
    copy: RowCopy,
}

impl GatheredRows {
    /// Memory called `name` for `count` rows as those of `tensors`, all of which `moves` brings there. So many rows of zeros at most come
    /// from a peer behind those: nothing waits for a kernel that fills memory beside a busy device's.
    pub(super) fn new(
        prepare: &mut Prepare<'_>,
        name: &str,
        tensors: Vec<BufferId>,
        moves: &[RowMove],
        (count, zero_rows): (usize, usize),
    ) -> Result<Self, ExecError> {
        let (scalar, columns) = (prepare.scalar(tensors[0])?, prepare.spec(tensors[0]).row_elements());
        let memory = prepare.scratch_rows(name, tensors[0], count);
        let make = || -> Result<Self, CudaError> {
            let (setup, row) = (prepare.setup(), columns * scalar.bytes() as usize);
            let zeros = (zero_rows > 0).then(|| prepare.zeros(zero_rows * row)).transpose()?;
            let tensor = RowCopyTensor { scalar, row_elements: columns as u64, wire: scalar };
            Ok(Self { memory, zeros, copy: RowCopy::new(setup, &[tensor], moves)?, tensors: tensors.clone() })
        };
        make().map_err(|error| prepare.device_error(error))
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let zeros = self.zeros.as_ref().map_or(0, DeviceBuffer::address);
        let from = |peer: usize, _| self.tensors.get(peer).map_or(zeros, |id| buffers[id.0].address());
        // SAFETY: `check_operands` has compared the rows with the buffers', the memory has room for all; the Program orders who else uses
        // the buffers.
        unsafe { self.copy.launch(stream, from, &[self.address(buffers)], &StartMark::none()) }
    }

    /// Where they lie then.
    pub(super) fn address(&self, buffers: &[CudaBuffer]) -> u64 {
        buffers[self.memory.0].address()
    }
}

/// Products whose results are rows for rows of the first operand.
struct Rows {
    /// Where the first operand's rows lie, unless they are gathered.
    sources: Vec<BufferId>,
    gathered: Option<GatheredRows>,
    weights: BufferId,
    gemm: GroupedGemm,
    out: BufferId,
    results: Results,
}

/// What becomes of results.
enum Results {
    InPlace,
    /// They are stored in scratch memory first.
    Copied(BufferId, RowCopy),
    Summed(BufferId, RowReduce),
}

impl Rows {
    /// `None` where no kernel takes them. That must depend on nothing but a pass's columns and types: its groups have the bits of the whole.
    fn new(
        prepare: &mut Prepare<'_>,
        products: &[schedule::Gemm],
        launch: &GroupedLaunch,
    ) -> Result<Option<Self>, ExecError> {
        let of_launch = &products[launch.products.clone()];
        let first = &of_launch[0];
        let (weights, k) = (first.b[0].buffer, prepare.spec(first.a[0].buffer).row_elements());
        let (layout, element) = (prepare.gemm_layout(first.layout), prepare.element(first.a[0].buffer)?);
        let (n, output) = (prepare.spec(first.out).row_elements(), prepare.scalar(first.out)?);
        let strides = [k, prepare.spec(weights).row_elements(), n];
        let plain =
            |gemm: &schedule::Gemm| gemm.b.len() == 1 && gemm.b[0].buffer == weights && gemm.bias.is_none();
        let sums = launch.results != GroupedResults::Summed || output == Scalar::F32;
        if !prepare.setup().device().arch().is_hopper()
            || !GroupedGemmSpec::takes(layout, strides, k, element, output)
            || !sums
            || !of_launch.iter().all(plain)
        {
            return Ok(None);
        }
        let places = Places::of(products, launch);
        let count = launch.rows();
        let results = match launch.results {
            GroupedResults::InPlace => Results::InPlace,
            GroupedResults::Copied => prepare.copied_results(first.out, count, &places.results)?,
            GroupedResults::Summed => {
                let Some(summed) = prepare.summed_results(first.out, launch)? else { return Ok(None) };
                summed
            }
        };
        let rows_of = |id: &BufferId| prepare.spec(*id).rows();
        let spec = GroupedGemmSpec {
            n,
            k,
            m: 0,
            layout,
            element,
            output,
            strides,
            rows_a: if launch.gathers { vec![count] } else { places.sources.iter().map(rows_of).collect() },
            rows_b: vec![rows_of(&weights)],
            rows_d: if launch.results == GroupedResults::InPlace { rows_of(&first.out) } else { count },
            adds: false,
            problems: places.problems,
            sm_margin: prepare.sm_margin(),
            grid: prepare.grid(),
        };
        let gathered = match launch.gathers {
            true => {
                let (sources, moves) = (places.sources.clone(), &places.gathers);
                Some(GatheredRows::new(prepare, GATHERED, sources, moves, (count, 0))?)
            }
            false => None,
        };
        let gemm = GroupedGemm::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        Ok(Some(Self { sources: places.sources, gathered, weights, gemm, out: first.out, results }))
    }

    fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let address = |id: &BufferId| buffers[id.0].address();
        let a: Vec<u64> = match &self.gathered {
            Some(gathered) => {
                gathered.launch(stream, buffers)?;
                vec![gathered.address(buffers)]
            }
            None => self.sources.iter().map(address).collect(),
        };
        let out = address(&self.out);
        let d = match &self.results {
            Results::InPlace => out,
            Results::Copied(memory, _) | Results::Summed(memory, _) => address(memory),
        };
        // SAFETY: `check_operands` has compared all shapes and types, and scratch memory has room for all rows; buffers live as long as what
        // is enqueued; the Program orders who else uses them.
        unsafe {
            self.gemm.launch(stream, &GroupedGemmTensors { a: &a, b: &[address(&self.weights)], d })?;
            match &self.results {
                Results::InPlace => Ok(()),
                Results::Copied(_, copy) => copy.launch(stream, |_, _| d, &[out], &StartMark::none()),
                Results::Summed(_, sum) => sum.launch(stream, None, |_| d, out, &StartMark::none()),
            }
        }
    }
}

/// Where the rows of a launch lie and go.
struct Places {
    sources: Vec<BufferId>,
    problems: Vec<GemmProblem>,
    /// Rows to where they lie together, and results back from there.
    gathers: Vec<RowMove>,
    results: Vec<RowMove>,
}

impl Places {
    fn of(products: &[schedule::Gemm], launch: &GroupedLaunch) -> Self {
        let mut places =
            Self { sources: Vec::new(), problems: Vec::new(), gathers: Vec::new(), results: Vec::new() };
        let in_place = launch.results == GroupedResults::InPlace;
        let mut together = 0;
        for GroupedProblem { product, rows } in &launch.problems {
            let mut problem =
                GemmProblem { b_row: products[*product].b[0].rows.start, ..GemmProblem::default() };
            for &GroupedRows { source: (buffer, first), to, count, .. } in rows {
                let source = places.sources.iter().position(|id| *id == buffer).unwrap_or_else(|| {
                    places.sources.push(buffer);
                    places.sources.len() - 1
                });
                let (here, there) =
                    (Range::new(first, first + count), Range::new(together, together + count));
                if launch.gathers {
                    add_move(&mut places.gathers, RowMove { peer: source, from: here, to: there });
                }
                if launch.results == GroupedResults::Copied {
                    let back = RowMove { peer: 0, from: there, to: Range::new(to, to + count) };
                    add_move(&mut places.results, back);
                }
                let (source, first) = if launch.gathers { (0, together) } else { (source, first) };
                let to = if in_place { to } else { together };
                add_rows(&mut problem.rows, ProblemRows { source, first, to, count });
                together += count;
            }
            places.problems.push(problem);
        }
        places
    }
}

/// Adds rows to move, which neighbours do together.
pub(super) fn add_move(moves: &mut Vec<RowMove>, next: RowMove) {
    let meets = |last: &&mut RowMove| {
        (last.peer, last.from.end, last.to.end) == (next.peer, next.from.start, next.to.start)
    };
    match moves.last_mut().filter(meets) {
        Some(last) => (last.from.end, last.to.end) = (next.from.end, next.to.end),
        None => moves.push(next),
    }
}

fn add_rows(rows: &mut Vec<ProblemRows>, next: ProblemRows) {
    let meets = |last: &&mut ProblemRows| {
        (last.source, last.first + last.count, last.to + last.count) == (next.source, next.first, next.to)
    };
    match rows.last_mut().filter(meets) {
        Some(last) => last.count += next.count,
        None => rows.push(next),
    }
}

/// The rows of the results, which are one after the other in memory, and those in which they are summed, in the order of the products.
fn terms(launch: &GroupedLaunch) -> Vec<(usize, usize)> {
    let mut terms = Vec::with_capacity(launch.rows());
    let mut together = 0;
    for (problem, next) in launch.problems.iter().zip(launch.problems.iter().skip(1).map(Some).chain([None]))
    {
        let end = next.map_or(launch.products.end, |next| next.product);
        for product in problem.product..end {
            let mut from = together;
            for piece in &problem.rows {
                if piece.product == product {
                    terms.extend((0..piece.count).map(|row| (from + row, piece.to + row)));
                }
                from += piece.count;
            }
        }
        together += problem.count();
    }
    terms
}

impl Prepare<'_> {
    fn copied_results(
        &mut self,
        out: BufferId,
        count: usize,
        moves: &[RowMove],
    ) -> Result<Results, ExecError> {
        let (scalar, columns) = (self.scalar(out)?, self.spec(out).row_elements());
        let tensor = RowCopyTensor { scalar, row_elements: columns as u64, wire: scalar };
        let copy = RowCopy::new(self.setup(), &[tensor], moves).map_err(|error| self.device_error(error))?;
        Ok(Results::Copied(self.scratch_rows(RESULTS, out, count), copy))
    }

    /// `None` where some row of the result has no product, and would stay as it is.
    fn summed_results(
        &mut self,
        out: BufferId,
        launch: &GroupedLaunch,
    ) -> Result<Option<Results>, ExecError> {
        let (scalar, columns) = (self.scalar(out)?, self.spec(out).row_elements());
        let spec = RowReduceSpec {
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            types: ReduceTypes { partial: scalar, wire: scalar, sum: scalar, result: scalar },
            rows: self.spec(out).rows(),
            row_elements: columns as u64,
        };
        let sum = RowReduce::of_terms(self.setup(), &spec, &terms(launch));
        let sum = sum.map_err(|error| self.device_error(error))?;
        Ok(sum.map(|sum| Results::Summed(self.scratch_rows(RESULTS, out, launch.rows()), sum)))
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_schedule::RowBlock;

    use super::*;

    fn gemm(
        expert: usize,
        a: &[(usize, usize)],
        out: &[(usize, usize)],
        accumulate: Accumulate,
    ) -> schedule::Gemm {
        let block = |buffer, start, end| RowBlock { buffer: BufferId(buffer), rows: Range::new(start, end) };
        schedule::Gemm {
            layout: GemmLayout::Nt,
            a: a.iter().map(|&(start, end)| block(0, start, end)).collect(),
            b: vec![block(1, 64 * expert, 64 * expert + 64)],
            out: BufferId(2),
            out_rows: out.iter().map(|&(start, end)| Range::new(start, end)).collect(),
            pass_rows: 100,
            bias: None,
            accumulate,
        }
    }

    fn step(peer: usize, from: usize, to: usize, count: usize) -> RowMove {
        RowMove { peer, from: Range::new(from, from + count), to: Range::new(to, to + count) }
    }

    /// Token 2 has three experts, 0 and 1 one each: its sum begins with the first expert's.
    #[test]
    fn rows_are_summed_in_the_order_of_products() {
        let products = [
            gemm(0, &[(0, 2)], &[(0, 1), (2, 3)], Accumulate::Start),
            gemm(1, &[(3, 4)], &[(1, 2)], Accumulate::Start),
            gemm(1, &[(2, 3)], &[(2, 3)], Accumulate::Continue),
            gemm(2, &[(4, 5)], &[(2, 3)], Accumulate::Continue),
        ];
        let launch = &GroupedLaunch::of(&products)[0];
        let places = Places::of(&products, launch);
        assert_eq!(places.problems.iter().map(|problem| problem.b_row).collect::<Vec<_>>(), [0, 64, 128]);
        let rows = |source, first, to, count| ProblemRows { source, first, to, count };
        assert_eq!(places.problems[1].rows, [rows(0, 2, 2, 2)]);
        // (row in memory, row of the result)
        assert_eq!(terms(launch), [(0, 0), (1, 2), (3, 1), (2, 2), (4, 2)]);
    }

    /// Rows that are not neighbours, of results that are.
    #[test]
    fn rows_are_gathered_in_the_order_of_their_results() {
        let scattered: Vec<_> = (0..100).map(|row| (2 * row, 2 * row + 1)).collect();
        let products = [
            gemm(0, &scattered, &[(0, 100)], Accumulate::Start),
            gemm(3, &[(201, 300)], &[(100, 199)], Accumulate::Start),
        ];
        let launch = &GroupedLaunch::of(&products)[0];
        assert!(launch.gathers);
        let places = Places::of(&products, launch);
        assert_eq!(places.gathers.len(), 101);
        assert_eq!((places.gathers[99], places.gathers[100]), (step(0, 198, 99, 1), step(0, 201, 100, 99)));
        assert_eq!(places.problems[0].rows, [ProblemRows { source: 0, first: 0, to: 0, count: 100 }]);
        assert_eq!(places.problems[1].rows, [ProblemRows { source: 0, first: 100, to: 100, count: 99 }]);
    }
}
