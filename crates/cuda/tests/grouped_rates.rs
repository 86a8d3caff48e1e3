//! Rates of grouped GEMMs on a GPU, compared with cuBLASLt's: `cargo test -p counterpoint-cuda --test grouped_rates -- --ignored
//! --nocapture`.
#![allow(unsafe_code)]

use counterpoint_cuda::kernel::{
    ElementType, Gemm, GemmGrid, GemmLayout, GemmLibrary, GemmProblem, GemmShape, GemmSpec, GemmTensors,
    GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, ProblemKBlock, ProblemRows, RandomFill, RowCopy,
    RowCopyTensor, RowMove, Scalar, StartMark,
};
use counterpoint_cuda::{CudaMachine, DeviceBuffer, Event, Stream, StreamPriority, Timing};
use counterpoint_mask::Range;

/// Experts, rows of each on average, features in and out.
const SIZES: [[usize; 4]; 6] = [
    [8, 1024, 2048, 1024],
    [8, 2048, 2048, 1024],
    [16, 1024, 4096, 2048],
    [32, 256, 4096, 2048],
    [8, 2048, 4096, 8192],
    [8, 2048, 8192, 4096],
];
const ROUNDS: usize = 12;
/// Bytes that are written between two runs: more than the second level cache holds.
const FLUSH_BYTES: usize = 192 << 20;
const BLOCK: usize = 64;

struct Bench {
    stream: Stream,
    library: Option<GemmLibrary>,
    flush: DeviceBuffer,
}

/// Products of some experts, whose rows follow each other.
struct Products {
    layout: GemmLayout,
    rows: Vec<usize>,
    n: usize,
    k: usize,
    m: usize,
    a: DeviceBuffer,
    b: DeviceBuffer,
    d: DeviceBuffer,
}

#[test]
#[ignore = "a measurement"]
fn rates() {
    let cuda = match CudaMachine::open(Timing::Off) {
        Ok(cuda) => cuda,
        Err(error) if error.is_missing() => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let device = &cuda.devices()[0];
    let stream = Stream::new(device, StreamPriority::High).unwrap();
    let flush = DeviceBuffer::new(device, FLUSH_BYTES).unwrap();
    let bench = Bench { library: GemmLibrary::open(device).ok(), stream, flush };
    println!(
        "rows of experts within 20 % of the mean; TFLOP/s, medians of {ROUNDS}, the second level cache flushed"
    );
    println!(
        "layout experts rows k n | grouped, its shape | fastest shape | a launch each | cuBLASLt each | cuBLASLt whole | grouped of whole"
    );
    for [experts, rows, k, n] in SIZES {
        for layout in GemmLayout::ALL {
            bench.compare(experts, rows, k, n, layout);
        }
    }
    println!(
        "rows one by one or in runs, nt: us of a gather and a launch, of the gather, and of a launch that stores runs"
    );
    for [experts, rows, k, n] in [SIZES[0], SIZES[2], SIZES[4]] {
        bench.scattered(experts, rows, k, n);
    }
}

/// Rows of each expert, within a fifth of the mean.
fn draw(experts: usize, mean: usize) -> Vec<usize> {
    let part = |expert: usize| (expert * 7919 + 13) % 101;
    (0..experts).map(|expert| mean * 4 / 5 + mean * 2 / 5 * part(expert) / 100).collect()
}

impl Bench {
    fn filled(&self, elements: usize, seed: u64) -> DeviceBuffer {
        let buffer = DeviceBuffer::new(self.stream.device(), 2 * elements).unwrap();
        let fill = RandomFill::new(self.stream.device(), Scalar::Bf16).unwrap();
        fill.launch(&self.stream, &buffer, seed).unwrap();
        buffer
    }

    fn products(&self, rows: Vec<usize>, k: usize, n: usize, layout: GemmLayout) -> Products {
        // Features in: k of nt, n of nn and tn; features out the other one, and m of tn.
        let (n, k, m) = match layout {
            GemmLayout::Nt => (n, k, 0),
            GemmLayout::Nn => (k, n, 0),
            GemmLayout::Tn => (k, 0, n),
        };
        let total: usize = rows.iter().sum();
        let [a, b, d] = match layout {
            GemmLayout::Tn => [total * m, total * n, rows.len() * m * n],
            _ => [total * k, rows.len() * n * k, total * n],
        };
        let (a, b, d) = (self.filled(a, 1), self.filled(b, 2), self.filled(d, 3));
        Products { layout, rows, n, k, m, a, b, d }
    }

    fn compare(&self, experts: usize, mean: usize, k: usize, n: usize, layout: GemmLayout) {
        let products = self.products(draw(experts, mean), k, n, layout);
        let spec = products.spec();
        let shapes = GroupedGemm::shapes(self.stream.device(), &spec).unwrap();
        let ends = self.filled(experts * BLOCK * products.n.max(products.m), 5);
        let grouped: Vec<GroupedGemm> = shapes
            .iter()
            .map(|shape| GroupedGemm::with_shape(&self.stream, &spec, *shape).unwrap())
            .collect();
        let each: Vec<Gemm> = (0..experts)
            .map(|expert| {
                let spec = products.gemm(expert);
                let shapes = Gemm::shapes(self.stream.device(), &spec).unwrap();
                let shape = shapes.into_iter().find(|shape| shape.parts() == 1).unwrap();
                Gemm::with_shape(&self.stream, &spec, shape).unwrap()
            })
            .collect();
        let library: Vec<_> = self
            .library
            .iter()
            .flat_map(|library| (0..=experts).map(|expert| library.gemm(&products.gemm(expert)).unwrap()))
            .collect();
        let mut runs: Vec<Box<dyn Fn() + '_>> = Vec::new();
        let (products, ends) = (&products, &ends);
        for gemm in &grouped {
            runs.push(Box::new(move || products.launch(&self.stream, gemm, ends)));
        }
        runs.push(Box::new(|| {
            for (expert, gemm) in each.iter().enumerate() {
                let [a, b, d] = products.addresses(expert);
                let tensors = GemmTensors { a: &[a], b, d: &[d], bias: 0, counters: &[] };
                // SAFETY: the tensors are those of the spec, and outlive the runs.
                unsafe { gemm.launch(&self.stream, &tensors) }.unwrap();
            }
        }));
        if let Some((whole, each)) = library.split_last() {
            let launch = |expert: usize, gemm: &counterpoint_cuda::kernel::LibraryGemm| {
                let [a, b, d] = products.addresses(expert);
                let tensors = GemmTensors { a: &[a], b, d: &[d], bias: 0, counters: &[] };
                // SAFETY: as above.
                unsafe { gemm.launch(&self.stream, &tensors) }.unwrap();
            };
            runs.push(Box::new(move || {
                each.iter().enumerate().for_each(|(expert, gemm)| launch(expert, gemm))
            }));
            runs.push(Box::new(move || launch(0, whole)));
        }
        if layout != GemmLayout::Tn {
            self.same_bits(products, &runs[0], &runs[grouped.len()]);
        }
        let seconds = self.medians(&runs);
        let flops = products.flops();
        let rate = |seconds: f64| flops / seconds / 1e12;
        let best = (0..grouped.len()).min_by(|a, b| seconds[*a].total_cmp(&seconds[*b])).unwrap();
        let others = &seconds[grouped.len()..];
        let whole = others.get(2).copied().unwrap_or(f64::NAN);
        println!(
            "{} {experts} {mean} {} {} | {:.0} {} ({:.1} us) | {:.0} {} | {:.0} | {:.0} | {:.0} | {:.3}",
            layout.name(),
            if layout == GemmLayout::Tn { products.m } else { products.k },
            products.n,
            rate(seconds[0]),
            named(&shapes[0]),
            1e6 * seconds[0],
            rate(seconds[best]),
            named(&shapes[best]),
            rate(others[0]),
            others.get(1).map_or(f64::NAN, |seconds| rate(*seconds)),
            rate(whole),
            whole / seconds[0],
        );
    }

    /// The grouped launch gives what the experts' own launches give.
    fn same_bits(&self, products: &Products, grouped: &dyn Fn(), each: &dyn Fn()) {
        let result = |run: &dyn Fn()| {
            products.d.fill(&self.stream, 0xff).unwrap();
            run();
            products.d.download::<u16>(&self.stream, 0, products.d.len() / 2).unwrap()
        };
        let unlike = result(grouped).iter().zip(&result(each)).filter(|(a, b)| a != b).count();
        assert_eq!(unlike, 0, "elements are unlike those of a launch for each expert");
    }

    /// Rows that lie in runs among those of twice as many tokens, in any order, and results likewise.
    fn scattered(&self, experts: usize, mean: usize, k: usize, n: usize) {
        let products = self.products(draw(experts, mean), k, n, GemmLayout::Nt);
        let total: usize = products.rows.iter().sum();
        let tokens = self.filled(2 * total * k, 4);
        let results = self.filled(2 * total * n, 6);
        for run in [1usize, 2, 4, 8, 16, 64] {
            // Every other run, in an order that jumps.
            let count = total / run;
            let step = (0..).map(|add| count * 5 / 8 + add).find(|step| gcd(*step, count) == 1).unwrap();
            let place = |row: usize| {
                if row / run < count { row / run * step % count * 2 * run + row % run } else { row * 2 }
            };
            let mut spec = products.spec();
            let in_pieces = |problem: &GemmProblem| {
                let rows = problem.rows.iter().flat_map(|rows| rows.to..rows.to + rows.count);
                let row = |row: usize| ProblemRows { source: 0, first: row, to: place(row), count: 1 };
                GemmProblem { rows: rows.map(row).collect(), ..problem.clone() }
            };
            let whole = GroupedGemm::new(&self.stream, &spec).unwrap();
            let per_unit = GroupedGemmSpec { grid: GemmGrid::PerUnit, ..spec.clone() };
            let per_unit = GroupedGemm::new(&self.stream, &per_unit).unwrap();
            spec.problems = spec.problems.iter().map(in_pieces).collect();
            spec.rows_d = 2 * total;
            let stores = GroupedGemm::new(&self.stream, &spec).unwrap();
            let moves: Vec<RowMove> =
                (0..total).map(|row| RowMove { peer: 0, from: one(place(row)), to: one(row) }).collect();
            let tensor = RowCopyTensor { scalar: Scalar::Bf16, row_elements: k as u64, wire: Scalar::Bf16 };
            let gather = RowCopy::new(&self.stream, &[tensor], &moves).unwrap();
            // SAFETY: the tensors are those of the specs, and outlive the runs.
            let gathers = || unsafe {
                gather
                    .launch(
                        &self.stream,
                        |_, _| tokens.address(),
                        &[products.a.address()],
                        &StartMark::none(),
                    )
                    .unwrap();
            };
            // SAFETY: as above.
            let launch = |gemm: &GroupedGemm, a: u64, d: u64| unsafe {
                let tensors = GroupedGemmTensors { a: &[a], b: &[products.b.address()], d };
                gemm.launch(&self.stream, &tensors).unwrap();
            };
            let (a, d) = (products.a.address(), products.d.address());
            let both = || {
                gathers();
                launch(&whole, a, d);
            };
            let runs: Vec<Box<dyn Fn() + '_>> = vec![
                Box::new(both),
                Box::new(gathers),
                Box::new(|| launch(&stores, a, results.address())),
                Box::new(|| launch(&whole, a, d)),
                Box::new(|| launch(&per_unit, a, d)),
            ];
            let us: Vec<String> =
                self.medians(&runs).into_iter().map(|seconds| format!("{:.1}", 1e6 * seconds)).collect();
            println!(
                "{experts} x {mean} {k} {n}, runs of {run}: gather + launch {}, gather {}, stores runs {}, all together {}, CTAs for each unit {}",
                us[0], us[1], us[2], us[3], us[4]
            );
        }
    }

    /// Of each run, with the cache flushed before.
    fn medians(&self, runs: &[Box<dyn Fn() + '_>]) -> Vec<f64> {
        let mut seconds = vec![Vec::new(); runs.len()];
        for round in 0..ROUNDS + 2 {
            let mut events = Vec::new();
            for run in runs {
                let event = || Event::timing(self.stream.device()).unwrap();
                let (begin, end) = (event(), event());
                self.flush.fill(&self.stream, 0).unwrap();
                begin.record(&self.stream).unwrap();
                run();
                end.record(&self.stream).unwrap();
                events.push((begin, end));
            }
            self.stream.synchronize().unwrap();
            for (of, (begin, end)) in seconds.iter_mut().zip(&events).filter(|_| round >= 2) {
                of.push(end.time_since(begin).unwrap().as_secs_f64());
            }
        }
        let median = |mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        seconds.into_iter().map(median).collect()
    }
}

impl Products {
    fn flops(&self) -> f64 {
        let total: usize = self.rows.iter().sum();
        2.0 * total as f64 * self.n as f64 * (self.k + self.m) as f64
    }

    /// The product of an expert, or behind the last one that of all rows with one weight.
    fn gemm(&self, expert: usize) -> GemmSpec {
        let rows = self.rows.get(expert).copied().unwrap_or_else(|| self.rows.iter().sum());
        let (m, k) = if self.layout == GemmLayout::Tn { (self.m, rows) } else { (rows, self.k) };
        GemmSpec::new(m, self.n, k, self.layout, ElementType::Bf16)
    }

    /// Of an expert's operands and result.
    fn addresses(&self, expert: usize) -> [u64; 3] {
        let first: usize = self.rows[..expert].iter().sum();
        let [a, b, d] = match self.layout {
            GemmLayout::Tn => [first * self.m, first * self.n, expert * self.m * self.n],
            _ => [first * self.k, expert * self.n * self.k, first * self.n],
        };
        [self.a.address() + 2 * a as u64, self.b.address() + 2 * b as u64, self.d.address() + 2 * d as u64]
    }

    fn spec(&self) -> GroupedGemmSpec {
        let Self { layout, rows, n, k, m, .. } = self;
        let (layout, n, k, m) = (*layout, *n, *k, *m);
        let total: usize = rows.iter().sum();
        let along_m = layout == GemmLayout::Tn;
        let b_rows = if layout == GemmLayout::Nt { n } else { k };
        let (mut first, mut problems) = (0, Vec::new());
        for (expert, &count) in rows.iter().enumerate() {
            problems.push(match along_m {
                true => GemmProblem {
                    rows: vec![ProblemRows { source: 0, first: 0, to: expert * m, count: m }],
                    b_row: 0,
                    // Whatever lies in the ends: what they take is what is measured.
                    k_blocks: (0..count.div_ceil(BLOCK))
                        .map(|block| match (block + 1) * BLOCK <= count {
                            true => (0, first + block * BLOCK),
                            false => (1, expert * BLOCK),
                        })
                        .map(|place| ProblemKBlock { a: place, b: place })
                        .collect(),
                },
                false => GemmProblem {
                    rows: vec![ProblemRows { source: 0, first, to: first, count }],
                    b_row: expert * b_rows,
                    k_blocks: Vec::new(),
                },
            });
            first += count;
        }
        let ends = rows.len() * BLOCK;
        let strides = match layout {
            GemmLayout::Nt => [k, k, n],
            GemmLayout::Nn => [k, n, n],
            GemmLayout::Tn => [m, n, n],
        };
        GroupedGemmSpec {
            n,
            k,
            m,
            layout,
            element: ElementType::Bf16,
            output: Scalar::Bf16,
            strides,
            rows_a: if along_m { vec![total, ends] } else { vec![total] },
            rows_b: if along_m { vec![total, ends] } else { vec![rows.len() * b_rows] },
            rows_d: if along_m { rows.len() * m } else { total },
            adds: false,
            problems,
            sm_margin: 0,
            grid: GemmGrid::Persistent,
        }
    }

    fn launch(&self, stream: &Stream, gemm: &GroupedGemm, ends: &DeviceBuffer) {
        let [a, b, d] = [&self.a, &self.b, &self.d].map(DeviceBuffer::address);
        let (a, b) = ([a, ends.address()], [b, ends.address()]);
        let count = if self.layout == GemmLayout::Tn { 2 } else { 1 };
        let tensors = GroupedGemmTensors { a: &a[..count], b: &b[..count], d };
        // SAFETY: the tensors are those of the spec, and outlive the runs.
        unsafe { gemm.launch(stream, &tensors) }.unwrap();
    }
}

fn named(shape: &GemmShape) -> String {
    format!("{}{:?}{:?}", shape.columns, shape.pair, shape.warpgroups)
        .replace("Cooperative", "C")
        .replace("Pingpong", "P")
}

fn one(row: usize) -> Range {
    Range::new(row, row + 1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
