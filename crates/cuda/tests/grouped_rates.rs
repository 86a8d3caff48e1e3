//! What rows that lie in runs cost a grouped GEMM on a GPU, gathered before or stored one run after the other, and a CTA for each unit of
//! tiles: `cargo test -p counterpoint-cuda --test grouped_rates -- --ignored --nocapture`. `counterpoint bench gemm --experts` has the
//! rates where rows lie together.
#![allow(unsafe_code)]

use counterpoint_cuda::kernel::{
    ElementType, GemmGrid, GemmLayout, GemmProblem, GroupedGemm, GroupedGemmSpec, GroupedGemmTensors,
    ProblemRows, RandomFill, RowCopy, RowCopyTensor, RowMove, Scalar, StartMark,
};
use counterpoint_cuda::{CudaMachine, DeviceBuffer, Event, Stream, StreamPriority, Timing};
use counterpoint_mask::Range;

/// Experts, rows of each on average, features in and out.
const SIZES: [[usize; 4]; 3] = [[8, 1024, 2048, 1024], [16, 1024, 4096, 2048], [8, 2048, 4096, 8192]];
const ROUNDS: usize = 12;
/// Bytes that are written between two runs: more than the second level cache holds.
const FLUSH_BYTES: usize = 192 << 20;

struct Bench {
    stream: Stream,
    flush: DeviceBuffer,
}

/// Products of some experts, whose rows follow each other.
struct Products {
    rows: Vec<usize>,
    n: usize,
    k: usize,
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
    let bench = Bench { stream, flush };
    println!(
        "rows one by one or in runs, nt: us of a gather and a launch, of the gather, and of a launch that stores runs"
    );
    for [experts, rows, k, n] in SIZES {
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

    fn products(&self, rows: Vec<usize>, k: usize, n: usize) -> Products {
        let total: usize = rows.iter().sum();
        let (a, b, d) =
            (self.filled(total * k, 1), self.filled(rows.len() * n * k, 2), self.filled(total * n, 3));
        Products { rows, n, k, a, b, d }
    }

    /// Rows that lie in runs among those of twice as many tokens, in any order, and results likewise.
    fn scattered(&self, experts: usize, mean: usize, k: usize, n: usize) {
        let products = self.products(draw(experts, mean), k, n);
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
    fn spec(&self) -> GroupedGemmSpec {
        let (n, k, total) = (self.n, self.k, self.rows.iter().sum());
        let mut first = 0;
        let problem = |(expert, &count): (usize, &usize)| {
            let rows = vec![ProblemRows { source: 0, first, to: first, count }];
            first += count;
            GemmProblem { rows, b_row: expert * n, k_blocks: Vec::new() }
        };
        let problems = self.rows.iter().enumerate().map(problem).collect();
        GroupedGemmSpec {
            n,
            k,
            m: 0,
            layout: GemmLayout::Nt,
            element: ElementType::Bf16,
            output: Scalar::Bf16,
            strides: [k, k, n],
            rows_a: vec![total],
            rows_b: vec![self.rows.len() * n],
            rows_d: total,
            adds: false,
            problems,
            sm_margin: 0,
            grid: GemmGrid::Persistent,
        }
    }
}

fn one(row: usize) -> Range {
    Range::new(row, row + 1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
