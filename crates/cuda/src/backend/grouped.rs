//! Grouped GEMMs of a Program: the products of all experts as one launch for each result, with one copy of the rows that it cannot take as
//! they lie.

use std::sync::Arc;

use counterpoint_exec::ExecError;
use counterpoint_schedule::{
    self as schedule, Accumulate, BufferId, GemmLayout, GroupedLaunch, GroupedResults, ReduceOp, SignalId,
    WaveGemm,
};

use super::compute::Prepare;
use super::grouped_gradient::Gradients;
use super::grouped_places::{Places, terms};
use super::linear::Product;
use super::row_lists::{ListKey, buffers_of};
use super::{CudaBuffer, CudaSignal};
use crate::kernel::{
    GemmProblem, GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, ProblemRows, ReduceTypes, RowCopy,
    RowCopyTensor, RowGather, RowReduce, RowReduceSpec, Scalar, StartMark,
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
        gathers: &[RowGather],
    ) -> Result<Arc<RowCopy>, CudaError> {
        let (scalar, columns) = like;
        let tensor = RowCopyTensor { scalar, row_elements: columns as u64, wire: scalar };
        RowCopy::of_steps(prepare.setup(), &[tensor], gathers).map(Arc::new)
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
    /// Buffers that the first operand's rows lie in, by their place among those of the products ([`buffers_of`]).
    sources: Vec<usize>,
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
                Results::Copied(RowCopy::of_steps(prepare.setup(), &[tensor], &places.results[..])?)
            }
            GroupedResults::Summed if to.0 != Scalar::F32 => return Ok(None),
            GroupedResults::Summed => match prepare.summed_results(&launch, to, rows)? {
                Some(sum) => Results::Summed(sum),
                // Some row of the result has no product, and would stay as it is.
                None => return Ok(None),
            },
        };
        let gather =
            launch.gathers.then(|| GatheredRows::copy_of(prepare, from, &places.gathers)).transpose()?;
        let all = buffers_of(of_launch.iter().map(|gemm| &gemm.a));
        let place = |id: &BufferId| all.iter().position(|one| one == id).unwrap_or(0);
        let sources = places.sources.iter().map(place).collect();
        let numbered = launch.problems.iter().map(|problem| problem.product - first);
        let problems = numbered.zip(places.problems).collect();
        Ok(Some(Self { count: places.count, sources, problems, gather, results }))
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
        let source = first.a.pieces()[0].buffer;
        let (weights, k) = (first.b.pieces()[0].buffer, prepare.spec(source).row_elements());
        let (layout, element) = (prepare.gemm_layout(first.layout), prepare.element(source)?);
        let (n, output) = (prepare.spec(first.out).row_elements(), prepare.scalar(first.out)?);
        let strides = [k, prepare.spec(weights).row_elements(), n];
        let of_weights = |gemm: &schedule::Gemm| gemm.b.together().filter(|block| block.buffer == weights);
        let plain = |gemm: &schedule::Gemm| of_weights(gemm).is_some() && gemm.bias.is_none();
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
        let buffers = buffers_of(of_launch.iter().map(|gemm| &gemm.a));
        let sources: Vec<BufferId> = placed.sources.iter().map(|place| buffers[*place]).collect();
        let rows_of = |id: &BufferId| prepare.spec(*id).rows();
        let count = placed.count;
        let problem = |(product, rows): &(usize, Vec<ProblemRows>)| {
            let b_row = of_weights(&of_launch[*product]).map_or(0, |block| block.rows.start);
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

impl Prepare<'_> {
    /// `None` where some row of the result has no product.
    fn summed_results(
        &self,
        launch: &GroupedLaunch,
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
        RowReduce::of_terms(self.setup(), &spec, &terms(launch))
    }
}
