//! Timing the products of experts on one GPU: as one launch, one after the other, and as one product with one weight.

use counterpoint_cost::ProblemSize;
use counterpoint_cuda::kernel::{
    ElementType, GemmEpilogue, GemmGrid, GemmLayout, GemmProblem, GemmRunner, GemmSpec, GemmTensors,
    GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, ProblemKBlock, ProblemRows, RandomFill, Scalar,
};
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, Stream, StreamPriority};

use super::gemm::{Added, Flush, GemmError, Judged, SEED_A, SEED_B, SEED_D, download_row, sample};

/// Rows of a block of k.
const BLOCK: usize = 64;

/// Products of experts whose rows follow each other: of A and D, in [`GemmLayout::Tn`] of A and B. There each adds to an f32 gradient of
/// its own, else each has a weight of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertProducts {
    /// How operands lie in memory.
    pub layout: GemmLayout,
    /// Elements of the operands.
    pub element: ElementType,
    /// Of all experts together: their rows are M, in [`GemmLayout::Tn`] K.
    pub size: ProblemSize,
    /// Rows of each expert.
    pub rows: Vec<usize>,
    /// Multiprocessors to leave to others.
    pub sm_margin: u32,
}

/// Who computes the products of all experts.
pub enum GroupedRunner {
    /// One launch of our grouped GEMM.
    Grouped(Box<GroupedGemm>),
    /// A launch for each expert.
    Each(Vec<GemmRunner>),
    /// As many rows with one weight, or one gradient: less to read, and another result.
    Whole(Box<GemmRunner>),
}

/// Tensors of the experts on a GPU, filled with random numbers.
pub struct GroupedGemmBench {
    stream: Stream,
    products: ExpertProducts,
    a: DeviceBuffer,
    b: DeviceBuffer,
    d: DeviceBuffer,
    /// Where experts' rows are K, the last block of each of A and of B, filled up with zeros.
    ends: [DeviceBuffer; 2],
    flush: Flush,
}

impl ExpertProducts {
    /// Rows within a fifth of the mean: `total` of them, unless one of the experts would have none.
    pub fn uneven(total: usize, experts: usize) -> Option<Vec<usize>> {
        let weights: Vec<usize> =
            (0..experts).map(|expert| 80 + 40 * ((expert * 7919 + 13) % 101) / 100).collect();
        let sum: usize = weights.iter().sum();
        let mut before = 0;
        let rows = weights.iter().map(|weight| {
            let first = total * before / sum;
            before += weight;
            total * before / sum - first
        });
        let rows: Vec<usize> = rows.collect();
        (!rows.contains(&0)).then_some(rows)
    }

    /// The same rows with one weight.
    fn whole(&self) -> Self {
        Self { rows: vec![self.rows.iter().sum()], ..self.clone() }
    }

    /// The product of one expert by itself.
    pub fn gemm(&self, expert: usize) -> GemmSpec {
        let ProblemSize { m, n, k } = self.size;
        let rows = self.rows[expert];
        let (m, k) = if self.layout == GemmLayout::Tn { (m, rows) } else { (rows, k) };
        let mut spec = GemmSpec::new(m, n, k, self.layout, self.element);
        spec.sm_margin = self.sm_margin;
        if self.layout == GemmLayout::Tn {
            (spec.epilogue, spec.output) = (GemmEpilogue::Accumulate, Scalar::F32);
        }
        spec
    }

    /// The product of all rows with one weight.
    pub fn whole_gemm(&self) -> GemmSpec {
        self.whole().gemm(0)
    }

    /// All of them as one launch.
    pub fn spec(&self) -> GroupedGemmSpec {
        let ProblemSize { m, n, k } = self.size;
        let (layout, experts) = (self.layout, self.rows.len());
        let [a, b, d] = self.rows_in_memory();
        let (along_m, ends) = (layout == GemmLayout::Tn, experts * BLOCK);
        let problem = |expert: usize| self.problem(expert);
        GroupedGemmSpec {
            n,
            k: if along_m { 0 } else { k },
            m: if along_m { m } else { 0 },
            layout,
            element: self.element,
            output: self.output(),
            strides: [layout.a_dims(m, k)[1], layout.b_dims(n, k)[1], n],
            rows_a: if along_m { vec![a, ends] } else { vec![a] },
            rows_b: if along_m { vec![b, ends] } else { vec![b] },
            rows_d: d,
            adds: along_m,
            problems: (0..experts).map(problem).collect(),
            sm_margin: self.sm_margin,
            grid: GemmGrid::Persistent,
        }
    }

    fn problem(&self, expert: usize) -> GemmProblem {
        let (first, count) = (self.first_row(expert), self.rows[expert]);
        if self.layout != GemmLayout::Tn {
            let rows = vec![ProblemRows { source: 0, first, to: first, count }];
            let b_row = expert * self.layout.b_dims(self.size.n, self.size.k)[0];
            return GemmProblem { rows, b_row, k_blocks: Vec::new() };
        }
        let place = |block: usize| match (block + 1) * BLOCK <= count {
            true => (0, first + block * BLOCK),
            false => (1, expert * BLOCK),
        };
        let k_blocks =
            (0..count.div_ceil(BLOCK)).map(|block| ProblemKBlock { a: place(block), b: place(block) });
        let m = self.size.m;
        let rows = vec![ProblemRows { source: 0, first: 0, to: expert * m, count: m }];
        GemmProblem { rows, b_row: 0, k_blocks: k_blocks.collect() }
    }

    fn output(&self) -> Scalar {
        if self.layout == GemmLayout::Tn { Scalar::F32 } else { self.element.scalar() }
    }

    fn first_row(&self, expert: usize) -> usize {
        self.rows[..expert].iter().sum()
    }

    /// Rows of A, B and D in memory.
    fn rows_in_memory(&self) -> [usize; 3] {
        let ProblemSize { m, n, k } = self.size;
        let experts = self.rows.len();
        match self.layout {
            GemmLayout::Nt => [m, experts * n, m],
            GemmLayout::Nn => [m, experts * k, m],
            GemmLayout::Tn => [k, k, experts * m],
        }
    }

    /// Where an expert's operands and its result begin, in elements.
    fn offsets(&self, expert: usize) -> [usize; 3] {
        let ProblemSize { m, n, k } = self.size;
        let first = self.first_row(expert);
        match self.layout {
            GemmLayout::Tn => [first * m, first * n, expert * m * n],
            _ => [first * k, expert * n * k, first * n],
        }
    }

    /// What was found of an element of D, by the definition.
    fn judge(&self, row: usize, column: usize, found: f64) -> Judged {
        let ProblemSize { m, n, k } = self.size;
        let scalar = self.element.scalar();
        let value = |seed, index: usize| f64::from(RandomFill::value(scalar, seed, index as u64));
        if self.layout == GemmLayout::Tn {
            let expert = row / m;
            let first = self.first_row(expert);
            let terms = (first..first + self.rows[expert])
                .map(|k| value(SEED_A, k * m + row % m) * value(SEED_B, k * n + column));
            let held = RandomFill::value(Scalar::F32, SEED_D, (row * n + column) as u64);
            return Judged::new(self.output(), terms, &Added::Held(f64::from(held)), found);
        }
        let mut end = 0;
        let expert = self.rows.iter().take_while(|rows| {
            end += **rows;
            end <= row
        });
        let expert = expert.count();
        let b = |index: usize| match self.layout {
            GemmLayout::Nt => (expert * n + column) * k + index,
            _ => (expert * k + index) * n + column,
        };
        let terms = (0..k).map(|index| value(SEED_A, row * k + index) * value(SEED_B, b(index)));
        Judged::new(self.output(), terms, &Added::Nothing, found)
    }
}

impl GroupedGemmBench {
    /// Puts their tensors on a GPU.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn new(device: &Device, products: ExpertProducts) -> Result<Self, CudaError> {
        let stream = Stream::new(device, StreamPriority::Low)?;
        let ProblemSize { m, n, k } = products.size;
        let columns = [products.layout.a_dims(m, k)[1], products.layout.b_dims(n, k)[1], n];
        let rows = products.rows_in_memory();
        let element = products.element.bytes();
        let bytes = [element, element, products.output().bytes() as usize];
        let buffer = |index: usize| DeviceBuffer::new(device, rows[index] * columns[index] * bytes[index]);
        let [a, b, d] = [buffer(0)?, buffer(1)?, buffer(2)?];
        let fill = RandomFill::new(device, products.element.scalar())?;
        fill.launch(&stream, &a, SEED_A)?;
        fill.launch(&stream, &b, SEED_B)?;
        let end_rows = if products.layout == GemmLayout::Tn { products.rows.len() * BLOCK } else { 0 };
        let end = |index: usize| DeviceBuffer::new(device, end_rows * columns[index] * element);
        let ends = [end(0)?, end(1)?];
        for (index, (end, whole)) in ends.iter().zip([&a, &b]).enumerate().filter(|_| end_rows > 0) {
            end.fill(&stream, 0)?;
            let row_bytes = columns[index] * element;
            for (expert, &count) in products.rows.iter().enumerate() {
                let (left, end_of_expert) = (count % BLOCK, products.first_row(expert) + count);
                let last = whole.slice((end_of_expert - left) * row_bytes..end_of_expert * row_bytes)?;
                end.copy_from(&stream, expert * BLOCK * row_bytes, &last)?;
            }
        }
        stream.synchronize()?;
        Ok(Self { flush: Flush::new(device)?, stream, products, a, b, d, ends })
    }

    /// The stream by which products are made ready.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    fn launch(&self, runner: &GroupedRunner) -> Result<(), CudaError> {
        match runner {
            GroupedRunner::Grouped(gemm) => {
                let [a, b] = [&self.a, &self.b].map(DeviceBuffer::address);
                let (a, b) = ([a, self.ends[0].address()], [b, self.ends[1].address()]);
                let count = if self.products.layout == GemmLayout::Tn { 2 } else { 1 };
                let tensors = GroupedGemmTensors { a: &a[..count], b: &b[..count], d: self.d.address() };
                // SAFETY: the tensors are those of the spec; they live as long as this value, and are freed after what is enqueued.
                unsafe { gemm.launch(&self.stream, &tensors) }
            }
            GroupedRunner::Each(gemms) => {
                gemms.iter().enumerate().try_for_each(|(expert, gemm)| self.launch_one(expert, gemm))
            }
            GroupedRunner::Whole(gemm) => self.launch_one(0, gemm),
        }
    }

    fn launch_one(&self, expert: usize, gemm: &GemmRunner) -> Result<(), CudaError> {
        let [a, b, d] = self.products.offsets(expert);
        let element = self.products.element.bytes();
        let a = [self.a.address() + (a * element) as u64];
        let b = self.b.address() + (b * element) as u64;
        let d = [self.d.address() + d as u64 * self.products.output().bytes()];
        let tensors = GemmTensors { a: &a, b, d: &d, bias: 0, counters: &[] };
        // SAFETY: as above.
        unsafe { gemm.launch(&self.stream, &tensors) }
    }

    /// Runs once, over NaN or over what is added to, and compares a sample with f64.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn error(&self, runner: &GroupedRunner) -> Result<GemmError, CudaError> {
        let output = self.products.output();
        if self.products.layout == GemmLayout::Tn {
            RandomFill::new(self.stream.device(), output)?.launch(&self.stream, &self.d, SEED_D)?;
        } else {
            self.d.fill(&self.stream, 0xff)?;
        }
        self.launch(runner)?;
        let whole = self.products.whole();
        let products = if matches!(runner, GroupedRunner::Whole(_)) { &whole } else { &self.products };
        let n = products.size.n;
        let rows = sample(products.rows_in_memory()[2], 16);
        let columns = sample(n, 24);
        let found = rows.iter().map(|row| download_row(&self.stream, &self.d, output, row * n, n));
        let found = found.collect::<Result<Vec<_>, _>>()?;
        Ok(GemmError::of_sample(&rows, &columns, &found, &|row, column, found| {
            products.judge(row, column, found)
        }))
    }

    /// As [`GemmBench::seconds`](super::GemmBench::seconds).
    ///
    /// # Errors
    /// As there.
    pub fn seconds(&self, runners: &[GroupedRunner], order: &[usize]) -> Result<Vec<Vec<f64>>, CudaError> {
        self.flush.seconds(&self.stream, runners.len(), order, |next| self.launch(&runners[next]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn products(layout: GemmLayout) -> ExpertProducts {
        let size = match layout {
            GemmLayout::Tn => [32, 24, 200],
            _ => [200, 24, 64],
        };
        let (element, rows) = (ElementType::Bf16, vec![70, 3, 127]);
        ExpertProducts { layout, element, size: size.into(), rows, sm_margin: 0 }
    }

    #[test]
    fn rows_are_uneven_and_all_there() {
        for (total, experts) in [(8192, 8), (1000, 7), (128, 64), (5, 1)] {
            let rows = ExpertProducts::uneven(total, experts).unwrap();
            assert_eq!((rows.iter().sum::<usize>(), rows.len()), (total, experts));
        }
        let rows = ExpertProducts::uneven(8192, 8).unwrap();
        assert!(rows.iter().all(|rows| (800..1240).contains(rows)), "{rows:?}");
        assert!(rows.iter().max() > rows.iter().min());
        assert_eq!(ExpertProducts::uneven(3, 8), None);
    }

    /// Every place that an expert reads lies in its own rows, and all multiply as much together as the whole.
    #[test]
    fn experts_read_their_own_rows() {
        for layout in GemmLayout::ALL {
            let products = products(layout);
            let spec = products.spec();
            let flops: f64 = (0..3).map(|expert| products.gemm(expert).flops()).sum();
            assert_eq!([flops, products.whole_gemm().flops()], [products.size.flops(); 2]);
            for (expert, problem) in spec.problems.iter().enumerate() {
                let [a, _, d] = products.offsets(expert);
                let first = products.first_row(expert);
                match layout {
                    GemmLayout::Tn => {
                        let whole = products.rows[expert] / BLOCK;
                        let begins = |block: &ProblemKBlock| block.a == block.b;
                        assert!(problem.k_blocks.iter().all(begins));
                        assert_eq!(problem.k_blocks.len(), products.rows[expert].div_ceil(BLOCK));
                        assert_eq!(problem.k_blocks[whole].a, (1, expert * BLOCK));
                        assert_eq!([a, d], [first * 32, problem.rows[0].to * 24]);
                    }
                    _ => assert_eq!([a, d], [problem.rows[0].first * 64, problem.rows[0].to * 24]),
                }
            }
        }
    }

    /// An element's definition is that of a plain product of the expert's own operands.
    #[test]
    fn elements_are_judged_by_their_experts() {
        for layout in GemmLayout::ALL {
            let products = products(layout);
            let ProblemSize { m, n, k } = products.size;
            let values = |seed, count: usize| -> Vec<f64> {
                let value = |at| f64::from(RandomFill::value(Scalar::Bf16, seed, at));
                (0..count as u64).map(value).collect()
            };
            let [a_rows, b_rows, d_rows] = products.rows_in_memory();
            let a = values(SEED_A, a_rows * layout.a_dims(m, k)[1]);
            let b = values(SEED_B, b_rows * layout.b_dims(n, k)[1]);
            let mut seen = 0;
            for expert in 0..3 {
                let size = products.gemm(expert).size;
                let [a_first, b_first, d_first] = products.offsets(expert);
                let (row, column) = (size.m - 1, 5);
                let term = |i: usize| match layout {
                    GemmLayout::Nt => a[a_first + row * size.k + i] * b[b_first + column * size.k + i],
                    GemmLayout::Nn => a[a_first + row * size.k + i] * b[b_first + i * n + column],
                    GemmLayout::Tn => a[a_first + i * size.m + row] * b[b_first + i * n + column],
                };
                let mut right: f64 = (0..size.k).map(term).sum();
                let at = d_first + row * n + column;
                if layout == GemmLayout::Tn {
                    right += f64::from(RandomFill::value(Scalar::F32, SEED_D, at as u64));
                }
                assert!(products.judge(at / n, column, right).of_bound < 1e-6, "{layout:?} {expert}");
                assert!(products.judge(at / n, column, right + 1.0).of_bound > 1.0);
                seen = at / n + 1;
            }
            assert_eq!(seen, d_rows);
        }
    }
}
