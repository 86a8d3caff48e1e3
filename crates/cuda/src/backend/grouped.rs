//! Grouped GEMMs of a Program: the products of all experts as one launch for each result, with one copy of the rows that it cannot take as
//! they lie.

use std::sync::Arc;

use counterpoint_exec::ExecError;
use counterpoint_schedule::{
    self as schedule, Accumulate, BufferId, GemmLayout, GroupedLaunch, GroupedProblem, GroupedResults,
    GroupedRows, ReduceOp, SignalId, WaveGemm,
};

use super::compute::Prepare;
use super::grouped_gradient::Gradients;
use super::linear::Product;
use super::row_lists::{ListKey, buffers_of};
use super::{CudaBuffer, CudaSignal};
use crate::kernel::{
    GemmProblem, GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, ProblemRows, ReduceTypes, RowCopy,
    RowCopyTensor, RowReduce, RowReduceSpec, RowStep, Scalar, StartMark,
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
        for (number, numbers) in GroupedLaunch::parts(&op.groups).enumerate() {
            let products = &op.groups[numbers.clone()];
            let value = numbers.end as u64;
            let made = match products[0].layout {
                GemmLayout::Tn => {
                    Gradients::new(prepare, op, products)?.map(|work| Work::Gradients(Box::new(work)))
                }
                GemmLayout::Nt | GemmLayout::Nn => {
                    Rows::new(prepare, op, (number, numbers))?.map(|work| Work::Rows(Box::new(work)))
                }
            };
            let apart = || products.iter().map(|gemm| Product::new(prepare, gemm)).collect::<Result<_, _>>();
            let work = match made {
                Some(work) => work,
                None => Work::Apart(apart()?),
            };
            launches.push(Launch { work, value });
        }
        let signal = op.signal.filter(|signal| prepare.is_waited_for(*signal));
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

/// Scratch memory for the rows of a first operand that lie together, and of a second one next to it.
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
    copy: Arc<RowCopy>,
}

impl GatheredRows {
    /// What brings rows as those of a tensor together; it may serve other passes.
    pub(super) fn copy_of(
        prepare: &Prepare<'_>,
        like: (Scalar, usize),
        steps: &[RowStep],
    ) -> Result<Arc<RowCopy>, CudaError> {
        let (scalar, columns) = like;
        let tensor = RowCopyTensor { scalar, row_elements: columns as u64, wire: scalar };
        RowCopy::of_steps(prepare.setup(), &[tensor], steps).map(Arc::new)
    }

    /// Memory called `name` for `count` rows as those of `tensors`, all of which `copy` brings there. So many rows of zeros at most come
    /// from a peer behind those: nothing waits for a kernel that fills memory on a busy device.
    pub(super) fn new(
        prepare: &mut Prepare<'_>,
        name: &str,
        tensors: Vec<BufferId>,
        copy: Arc<RowCopy>,
        (count, zero_rows): (usize, usize),
    ) -> Result<Self, ExecError> {
        let (scalar, columns) = (prepare.scalar(tensors[0])?, prepare.spec(tensors[0]).row_elements());
        let memory = prepare.scratch_rows(name, tensors[0], count);
        let row = columns * scalar.bytes() as usize;
        let zeros = (zero_rows > 0).then(|| prepare.zeros(zero_rows * row)).transpose();
        let zeros = zeros.map_err(|error| prepare.device_error(error))?;
        Ok(Self { memory, zeros, copy, tensors })
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
    /// Where results that are not stored where they belong are stored first.
    together: Option<BufferId>,
    placed: Arc<PlacedRows>,
}

/// What follows from the rows of a launch, whatever is multiplied with them.
struct PlacedRows {
    count: usize,
    /// Buffers that the first operand's rows lie in, by their place among those of the products ([`buffers_of`]), of so many.
    sources: Vec<usize>,
    buffers: usize,
    /// Of each problem one of its products, counted from the launch's first, and its rows.
    problems: Vec<(usize, Vec<ProblemRows>)>,
    gather: Option<Arc<RowCopy>>,
    results: Results,
}

/// What becomes of results.
enum Results {
    InPlace,
    /// They are stored in scratch memory first.
    Copied(RowCopy),
    Summed(RowReduce),
}

impl PlacedRows {
    /// `None` where no kernel takes them.
    fn new(
        prepare: &Prepare<'_>,
        products: &[schedule::Gemm],
        numbers: std::ops::Range<usize>,
        [from, to]: [(Scalar, usize); 2],
    ) -> Result<Option<Self>, CudaError> {
        let (first, rows) = (numbers.start, prepare.spec(products[numbers.start].out).rows());
        let of_launch = &products[numbers.clone()];
        let launch = GroupedLaunch::of_part(numbers, products);
        let places = Places::of(&launch);
        let results = match launch.results {
            GroupedResults::InPlace => Results::InPlace,
            GroupedResults::Copied => {
                let tensor = RowCopyTensor { scalar: to.0, row_elements: to.1 as u64, wire: to.0 };
                Results::Copied(RowCopy::of_steps(prepare.setup(), &[tensor], &places.results)?)
            }
            GroupedResults::Summed if to.0 != Scalar::F32 => return Ok(None),
            GroupedResults::Summed => match prepare.summed_results((&launch, places.count), to, rows)? {
                Some(sum) => Results::Summed(sum),
                // Some row of the result has no product, and would stay as it is.
                None => return Ok(None),
            },
        };
        let gather =
            launch.gathers.then(|| GatheredRows::copy_of(prepare, from, &places.gathers)).transpose()?;
        // Where all rows lie in one buffer, the products name no other.
        let known = (places.sources.len() == 1).then_some(1);
        let all = buffers_of(of_launch.iter().map(|gemm| &gemm.a[..]), known);
        let place = |id: &BufferId| all.iter().position(|one| one == id).unwrap_or(0);
        let sources = places.sources.iter().map(place).collect();
        let numbered = launch.problems.iter().map(|problem| problem.product - first);
        let problems = numbered.zip(places.problems).collect();
        Ok(Some(Self { count: places.count, sources, buffers: all.len(), problems, gather, results }))
    }
}

impl Rows {
    /// `None` where no kernel takes them. That must depend on nothing but a pass's columns and types: its groups have the bits of the whole.
    fn new(
        prepare: &mut Prepare<'_>,
        op: &WaveGemm,
        (number, numbers): (usize, std::ops::Range<usize>),
    ) -> Result<Option<Self>, ExecError> {
        let of_launch = &op.groups[numbers.clone()];
        let first = &of_launch[0];
        let (weights, k) = (first.b[0].buffer, prepare.spec(first.a[0].buffer).row_elements());
        let (layout, element) = (prepare.gemm_layout(first.layout), prepare.element(first.a[0].buffer)?);
        let (n, output) = (prepare.spec(first.out).row_elements(), prepare.scalar(first.out)?);
        let strides = [k, prepare.spec(weights).row_elements(), n];
        let plain =
            |gemm: &schedule::Gemm| gemm.b.len() == 1 && gemm.b[0].buffer == weights && gemm.bias.is_none();
        if !prepare.setup().device().arch().is_hopper()
            || !GroupedGemmSpec::takes(layout, strides, k, element, output)
            || !of_launch.iter().all(plain)
        {
            return Ok(None);
        }
        let scalars = [element.scalar(), output];
        let key = ListKey::Launch { number, columns: [k, n], scalars };
        let place = || PlacedRows::new(prepare, &op.groups, numbers, [(scalars[0], k), (scalars[1], n)]);
        let Some(placed) = prepare.shared_list(&op.rows, key, place)? else { return Ok(None) };
        let buffers = buffers_of(of_launch.iter().map(|gemm| &gemm.a[..]), Some(placed.buffers));
        let sources: Vec<BufferId> = placed.sources.iter().map(|place| buffers[*place]).collect();
        let rows_of = |id: &BufferId| prepare.spec(*id).rows();
        let count = placed.count;
        let problem = |(product, rows): &(usize, Vec<ProblemRows>)| {
            let b_row = of_launch[*product].b[0].rows.start;
            GemmProblem { rows: rows.clone(), b_row, k_blocks: Vec::new() }
        };
        let is_in_place = matches!(placed.results, Results::InPlace);
        let spec = GroupedGemmSpec {
            n,
            k,
            m: 0,
            layout,
            element,
            output,
            strides,
            rows_a: if placed.gather.is_some() { vec![count] } else { sources.iter().map(rows_of).collect() },
            rows_b: vec![rows_of(&weights)],
            rows_d: if is_in_place { rows_of(&first.out) } else { count },
            adds: false,
            problems: placed.problems.iter().map(problem).collect(),
            sm_margin: prepare.sm_margin(),
            grid: prepare.grid(),
        };
        let gathered = match &placed.gather {
            Some(copy) => {
                Some(GatheredRows::new(prepare, GATHERED, sources.clone(), copy.clone(), (count, 0))?)
            }
            None => None,
        };
        let together = (!is_in_place).then(|| prepare.scratch_rows(RESULTS, first.out, count));
        let gemm = GroupedGemm::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        Ok(Some(Self { sources, gathered, weights, gemm, out: first.out, together, placed }))
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
        let d = self.together.as_ref().map_or(out, address);
        // SAFETY: `check_operands` has compared all shapes and types, and scratch memory has room for all rows; buffers live as long as what
        // is enqueued; the Program orders who else uses them.
        unsafe {
            self.gemm.launch(stream, &GroupedGemmTensors { a: &a, b: &[address(&self.weights)], d })?;
            match &self.placed.results {
                Results::InPlace => Ok(()),
                Results::Copied(copy) => copy.launch(stream, |_, _| d, &[out], &StartMark::none()),
                Results::Summed(sum) => sum.launch(stream, None, |_| d, out, &StartMark::none()),
            }
        }
    }
}

/// Where the rows of a launch lie and go.
#[derive(Default)]
struct Places {
    sources: Vec<BufferId>,
    problems: Vec<Vec<ProblemRows>>,
    /// Rows of all problems.
    count: usize,
    /// Rows to where they lie together, and results back from there.
    gathers: Vec<RowStep>,
    results: Vec<RowStep>,
}

impl Places {
    fn of(launch: &GroupedLaunch) -> Self {
        let mut places = Self::default();
        let in_place = launch.results == GroupedResults::InPlace;
        let (mut together, mut source) = (0, 0);
        if launch.gathers {
            places.gathers.reserve(launch.problems.iter().map(|problem| problem.rows.len()).sum());
        }
        for GroupedProblem { rows, .. } in &launch.problems {
            let begin = together;
            let mut problem: Vec<ProblemRows> = Vec::new();
            for &GroupedRows { buffer, first, to, count, .. } in rows {
                // Mostly that of the row before.
                if places.sources.get(source) != Some(&buffer) {
                    source = places.source(buffer);
                }
                if launch.gathers {
                    let step = RowStep { peer: source as u32, from: first, to: together, count };
                    add_step(&mut places.gathers, step);
                }
                if launch.results == GroupedResults::Copied {
                    add_step(&mut places.results, RowStep { peer: 0, from: together, to, count });
                }
                if in_place {
                    let (from, first) = if launch.gathers { (0, together) } else { (source, first) };
                    let (first, to, count) = (first as usize, to as usize, count as usize);
                    add_rows(&mut problem, ProblemRows { source: from, first, to, count });
                }
                together += count;
            }
            if let (false, Some(rows)) = (in_place, rows.first()) {
                // Rows of a problem that are not gathered follow each other, and so do their results.
                let (source, first) = if launch.gathers { (0, begin) } else { (source, rows.first) };
                let (first, to, count) = (first as usize, begin as usize, (together - begin) as usize);
                problem.push(ProblemRows { source, first, to, count });
            }
            places.problems.push(problem);
        }
        places.count = together as usize;
        places
    }

    /// The number of a buffer among the sources.
    fn source(&mut self, buffer: BufferId) -> usize {
        self.sources.iter().position(|id| *id == buffer).unwrap_or_else(|| {
            self.sources.push(buffer);
            self.sources.len() - 1
        })
    }
}

/// Adds rows to move, which neighbours do together.
#[inline]
pub(super) fn add_step(steps: &mut Vec<RowStep>, next: RowStep) {
    if let Some(last) = steps.last_mut()
        && last.from + last.count == next.from
        && last.to + last.count == next.to
        && last.peer == next.peer
    {
        last.count += next.count;
        return;
    }
    steps.push(next);
}

#[inline]
fn add_rows(rows: &mut Vec<ProblemRows>, next: ProblemRows) {
    if let Some(last) = rows.last_mut()
        && last.first + last.count == next.first
        && last.to + last.count == next.to
        && last.source == next.source
    {
        last.count += next.count;
        return;
    }
    rows.push(next);
}

/// The rows of the results, so many, which are one after the other in memory, and those in which they are summed, in the order of the products.
fn terms(launch: &GroupedLaunch, count: usize) -> Vec<(u32, u32)> {
    let mut terms = Vec::with_capacity(count);
    let mut together = 0;
    let ends = launch.problems.iter().skip(1).map(|next| next.product).chain([launch.products.end]);
    for (problem, end) in launch.problems.iter().zip(ends) {
        let mut from = together;
        for product in problem.product..end {
            from = together;
            for piece in &problem.rows {
                if piece.product as usize == product {
                    for row in 0..piece.count {
                        terms.push((from + row, piece.to + row));
                    }
                }
                from += piece.count;
            }
        }
        together = from;
    }
    terms
}

impl Prepare<'_> {
    /// `None` where some row of the result has no product.
    fn summed_results(
        &self,
        (launch, count): (&GroupedLaunch, usize),
        (scalar, columns): (Scalar, usize),
        rows: usize,
    ) -> Result<Option<RowReduce>, CudaError> {
        let spec = RowReduceSpec {
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            types: ReduceTypes { partial: scalar, wire: scalar, sum: scalar, result: scalar },
            rows,
            row_elements: columns as u64,
            divisors: None,
        };
        RowReduce::of_terms(self.setup(), &spec, &terms(launch, count))
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;
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
            columns: None,
            bias: None,
            accumulate,
        }
    }

    fn step(peer: u32, from: u32, to: u32, count: u32) -> RowStep {
        RowStep { peer, from, to, count }
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
        let places = Places::of(launch);
        assert_eq!(launch.problems.iter().map(|problem| problem.product).collect::<Vec<_>>(), [0, 1, 3]);
        let rows = |source, first, to, count| ProblemRows { source, first, to, count };
        assert_eq!(places.problems[1], [rows(0, 2, 2, 2)]);
        // (row in memory, row of the result)
        assert_eq!(terms(launch, places.count), [(0, 0), (1, 2), (3, 1), (2, 2), (4, 2)]);
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
        let places = Places::of(launch);
        assert_eq!(places.gathers.len(), 101);
        assert_eq!((places.gathers[99], places.gathers[100]), (step(0, 198, 99, 1), step(0, 201, 100, 99)));
        assert_eq!(places.problems[0], [ProblemRows { source: 0, first: 0, to: 0, count: 100 }]);
        assert_eq!(places.problems[1], [ProblemRows { source: 0, first: 100, to: 100, count: 99 }]);
    }
}
