//! Timing products with their collectives among the GPUs of this process, beside cuBLASLt and NCCL one after the other, and
//! checking what came out.

use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::{ExecError, GemmCollective, GemmCollectiveSpec, Prepared, World, WorldConfig};
use counterpoint_plan::WaveGroups;
use counterpoint_schedule::OverlapPolicy;
use half::{bf16, f16};

use super::gemm::{element_bound, sample};
use crate::backend::{exec_error, lock};
use crate::kernel::{ElementType, GemmLayout, GemmLibrary, GemmSpec, GemmTensors, LibraryGemm, RandomFill};
use crate::nccl::{NcclCollective, NcclRank};
use crate::{
    CudaBackend, CudaBuffer, CudaError, CudaMachine, CudaTransport, DeviceBuffer, Event, Stream,
    StreamPriority,
};

/// GPUs with a rank each, and NCCL among them.
pub struct GemmCollectiveBench {
    machine: CudaMachine,
    nccl: Vec<NcclRank>,
    libraries: Vec<GemmLibrary>,
    limit: Duration,
}

/// What came of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmCollectiveTimes {
    /// Seconds of one run under each policy, by sample: of the slowest rank.
    pub policies: Vec<Vec<f64>>,
    /// Likewise cuBLASLt, then NCCL.
    pub library: Vec<f64>,
    /// cuBLASLt alone.
    pub product: Vec<f64>,
    /// NCCL alone.
    pub collective: Vec<f64>,
    /// Under each policy the relative error of a sample of elements against f64.
    pub errors: Vec<f64>,
    /// Likewise the largest share of an element's bound.
    pub of_bound: Vec<f64>,
    /// The relative error of cuBLASLt and NCCL.
    pub library_error: f64,
    /// Under each policy, elements of the sample that differ from those under the first one.
    pub different: Vec<u64>,
}

/// How often a case is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmCollectiveRuns {
    /// Runs of one sample, one after the other.
    pub iterations: usize,
    /// Samples.
    pub samples: usize,
}

type Ranked = Prepared<CudaBackend, CudaTransport>;

impl GemmCollectiveBench {
    /// Connects the GPUs of a machine, a rank each. Each wait lasts `limit` at most.
    ///
    /// # Errors
    /// When there are fewer, or no cuBLASLt or NCCL.
    pub fn new(machine: CudaMachine, limit: Duration) -> Result<Self, CudaError> {
        let config = WorldConfig { limit, ..WorldConfig::default() };
        let nccl = NcclRank::connect(machine.devices(), &World::new(machine.devices().len(), config))?;
        let libraries = machine.devices().iter().map(GemmLibrary::open).collect::<Result<_, _>>()?;
        Ok(Self { machine, nccl, libraries, limit })
    }

    /// The GPUs.
    pub fn machine(&self) -> &CudaMachine {
        &self.machine
    }

    /// Times and checks one case under several policies, those that overlap a product with its own collective in these groups.
    ///
    /// # Errors
    /// Whatever ends a run; [`ExecError::Tensor`] for a type that GPUs do not multiply.
    pub fn measure(
        &self,
        spec: &GemmCollectiveSpec,
        policies: &[OverlapPolicy],
        groups: &WaveGroups,
        runs: GemmCollectiveRuns,
    ) -> Result<GemmCollectiveTimes, ExecError> {
        let element = match spec.dtype {
            counterpoint_plan::DType::F16 => ElementType::F16,
            _ => ElementType::Bf16,
        };
        let prepared: Vec<Vec<Ranked>> = self.prepare(spec, policies, groups)?;
        let failed = |rank: usize| move |error| exec_error(rank, "a benchmark", error);
        let mut ranks = Vec::new();
        for (rank, programs) in prepared.into_iter().enumerate() {
            ranks.push(Rank::new(self, spec, element, rank, programs).map_err(failed(rank))?);
        }
        let meeting = Meeting::new(ranks.len(), self.limit);
        let results: Vec<RankTimes> = thread::scope(|scope| {
            let meeting = &meeting;
            let threads: Vec<_> = ranks
                .iter_mut()
                .map(|rank| scope.spawn(move || rank.run(meeting, runs).inspect_err(|_| meeting.give_up())))
                .collect();
            let joined = threads.into_iter().enumerate().map(|(rank, thread)| {
                thread.join().unwrap_or_else(|_| {
                    let place = "a benchmark".to_owned();
                    Err(ExecError::RankPanicked { rank, place, message: "see above".to_owned() })
                })
            });
            joined.collect::<Result<_, _>>()
        })?;
        let slowest = |contender: usize| -> Vec<f64> {
            (0..runs.samples)
                .map(|at| results.iter().map(|times| times.seconds[contender][at]).fold(0.0, f64::max))
                .collect()
        };
        let judged = self.judge(spec, element, &results);
        let count = policies.len();
        Ok(GemmCollectiveTimes {
            policies: (0..count).map(slowest).collect(),
            library: slowest(count),
            product: slowest(count + 1),
            collective: slowest(count + 2),
            errors: judged[..count].iter().map(|judged| judged.relative).collect(),
            of_bound: judged[..count].iter().map(|judged| judged.of_bound).collect(),
            library_error: judged[count].relative,
            different: (0..count)
                .map(|at| {
                    let differ = |times: &RankTimes| {
                        let pairs = times.rows[at].iter().flatten().zip(times.rows[0].iter().flatten());
                        pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count() as u64
                    };
                    results.iter().map(differ).sum()
                })
                .collect(),
        })
    }

    /// The Programs of every rank, by rank and policy.
    fn prepare(
        &self,
        spec: &GemmCollectiveSpec,
        policies: &[OverlapPolicy],
        groups: &WaveGroups,
    ) -> Result<Vec<Vec<Ranked>>, ExecError> {
        let mut by_rank: Vec<Vec<Ranked>> = (0..spec.ranks).map(|_| Vec::new()).collect();
        for policy in policies {
            let config = WorldConfig { limit: self.limit, poison: false, ..WorldConfig::default() };
            let ranks = spec.prepare_groups(&self.machine, groups.clone(), *policy, config)?;
            for (rank, prepared) in ranks.into_iter().enumerate() {
                by_rank[rank].push(prepared);
            }
        }
        Ok(by_rank)
    }

    /// Compares every contender's sample with f64: the Programs', then the library's.
    fn judge(&self, spec: &GemmCollectiveSpec, element: ElementType, results: &[RankTimes]) -> Vec<Judged> {
        let contenders = results.first().map_or(0, |times| times.rows.len());
        let (columns, scalar) = (sample(spec.n, COLUMNS), element.scalar());
        let parts: Vec<Vec<Sums>> = thread::scope(|scope| {
            let mut threads = Vec::new();
            for (rank, times) in results.iter().enumerate() {
                for (at, &row) in times.sampled.iter().enumerate() {
                    let columns = &columns;
                    threads.push(scope.spawn(move || {
                        let mut sums = vec![Sums::default(); contenders];
                        for &column in columns {
                            let expected = expected(spec, element, rank, row, column);
                            let bound = expected.bound(scalar, spec);
                            for (sums, rows) in sums.iter_mut().zip(&times.rows) {
                                sums.add(f64::from(rows[at][column]), expected.right, bound);
                            }
                        }
                        sums
                    }));
                }
            }
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        let total = |contender: usize| {
            let all = parts.iter().map(|sums| sums[contender]);
            let sums = all.fold(Sums::default(), |a, b| Sums {
                errors: a.errors + b.errors,
                squares: a.squares + b.squares,
                // Not `max`, which would overlook a NaN.
                of_bound: if b.of_bound <= a.of_bound { a.of_bound } else { b.of_bound },
            });
            Judged { relative: (sums.errors / sums.squares).sqrt(), of_bound: sums.of_bound }
        };
        (0..contenders).map(total).collect()
    }
}

/// Elements that are compared with f64: of so many rows of each rank so many columns.
const ROWS: usize = 6;
const COLUMNS: usize = 16;
const SEED: u64 = 100;
/// What keeps a device busy for some milliseconds.
const GATE_BYTES: usize = 512 << 20;
const GATE_FILLS: usize = 24;

/// One rank with its tensors and all that is timed on it.
struct Rank<'a> {
    bench: &'a GemmCollectiveBench,
    spec: GemmCollectiveSpec,
    element: ElementType,
    rank: usize,
    programs: Vec<Ranked>,
    stream: Stream,
    /// What NCCL receives or reads as a whole: gathered rows, or shares.
    whole: DeviceBuffer,
    x: DeviceBuffer,
    weight: DeviceBuffer,
    y: DeviceBuffer,
    gate: DeviceBuffer,
    library: LibraryGemm,
}

/// What one rank measured.
struct RankTimes {
    /// Of each contender and sample.
    seconds: Vec<Vec<f64>>,
    /// Rows of the result that were taken.
    sampled: Vec<usize>,
    /// Of each contender that has a result.
    rows: Vec<Vec<Vec<f32>>>,
}

/// What a rank enqueues and times.
#[derive(Clone, Copy)]
enum Contender {
    Program(usize),
    Library,
    Product,
    Collective,
}

impl<'a> Rank<'a> {
    fn new(
        bench: &'a GemmCollectiveBench,
        spec: &GemmCollectiveSpec,
        element: ElementType,
        rank: usize,
        mut programs: Vec<Ranked>,
    ) -> Result<Self, CudaError> {
        let GemmCollectiveSpec { collective, ranks, m, n, k, dtype } = *spec;
        let device = &bench.machine.devices()[rank];
        device.bind()?;
        let stream = Stream::new(device, StreamPriority::Low)?;
        let gathers = collective == GemmCollective::AllGather;
        let x_rows = if gathers { m / ranks } else { m };
        let y_rows = if collective == GemmCollective::ReduceScatter { m / ranks } else { m };
        let buffer =
            |rows: usize, columns: usize| DeviceBuffer::new(device, rows * columns * element.bytes());
        let (x, weight, y) = (buffer(x_rows, k)?, buffer(n, k)?, buffer(y_rows, n)?);
        let whole = if gathers { buffer(m, k)? } else { buffer(m, n)? };
        let gate = DeviceBuffer::new(device, GATE_BYTES)?;
        let fill = RandomFill::new(device, element.scalar())?;
        fill.launch(&stream, &x, SEED + rank as u64)?;
        fill.launch(&stream, &weight, weight_seed(rank))?;
        stream.synchronize()?;
        let library = bench.libraries[rank].gemm(&GemmSpec::new(m, n, k, GemmLayout::Nt, element))?;
        for program in &mut programs {
            let tensors = [("x", &x, [x_rows, k]), ("weight", &weight, [n, k]), ("y", &y, [y_rows, n])];
            for (name, memory, shape) in tensors {
                let buffer = CudaBuffer::new(memory.clone(), &shape, dtype)?;
                // The Programs are those of the spec.
                program.bind(name, buffer).map_err(|error| CudaError::Launch {
                    kernel: "a benchmark".to_owned(),
                    reason: error.to_string(),
                })?;
            }
        }
        Ok(Self { bench, spec: *spec, element, rank, programs, stream, whole, x, weight, y, gate, library })
    }

    fn run(&mut self, meeting: &Meeting, runs: GemmCollectiveRuns) -> Result<RankTimes, ExecError> {
        let programs = (0..self.programs.len()).map(Contender::Program);
        let contenders: Vec<Contender> =
            programs.chain([Contender::Library, Contender::Product, Contender::Collective]).collect();
        let y_rows = self.y.len() / (self.spec.n * self.element.bytes());
        let sampled = sample(y_rows, ROWS);
        let mut rows = Vec::new();
        for &contender in &contenders[..=self.programs.len()] {
            self.fail(self.y.fill(&self.stream, 0xff).and_then(|()| self.stream.synchronize()))?;
            meeting.wait(self.rank)?;
            self.enqueue(contender)?;
            self.finish(contender)?;
            meeting.wait(self.rank)?;
            rows.push(self.fail(sampled.iter().map(|&row| self.row(row)).collect::<Result<_, _>>())?);
        }
        let device = self.stream.device().clone();
        let event = || Event::timing(&device);
        let (begin, end) = (self.fail(event())?, self.fail(event())?);
        let mut seconds = vec![Vec::new(); contenders.len()];
        for _ in 0..runs.samples {
            for (&contender, seconds) in contenders.iter().zip(&mut seconds) {
                meeting.wait(self.rank)?;
                // Not timed: while the device is busy with these, all runs that are timed are enqueued, on every rank.
                for _ in 0..GATE_FILLS {
                    self.fail(self.gate.fill(self.queue(contender), 0))?;
                }
                self.enqueue(contender)?;
                self.fail(begin.record(self.queue(contender)))?;
                for _ in 0..runs.iterations {
                    self.enqueue(contender)?;
                }
                self.fail(end.record(self.queue(contender)))?;
                self.finish(contender)?;
                let took = self.fail(end.time_since(&begin))?;
                seconds.push(took.as_secs_f64() / runs.iterations as f64);
            }
        }
        Ok(RankTimes { seconds, sampled, rows })
    }

    fn fail<R>(&self, result: Result<R, CudaError>) -> Result<R, ExecError> {
        result.map_err(|error| exec_error(self.rank, "a benchmark", error))
    }

    fn queue(&self, contender: Contender) -> &Stream {
        match contender {
            Contender::Program(index) => self.programs[index].streams()[0].queue(),
            _ => &self.stream,
        }
    }

    fn enqueue(&mut self, contender: Contender) -> Result<(), ExecError> {
        if let Contender::Program(index) = contender {
            return self.programs[index].start(Instant::now());
        }
        let gathers = self.spec.collective == GemmCollective::AllGather;
        let enqueued = match contender {
            Contender::Program(_) => Ok(()),
            Contender::Product => self.product(),
            Contender::Collective => self.collective(),
            Contender::Library if gathers => self.collective().and_then(|()| self.product()),
            Contender::Library => self.product().and_then(|()| self.collective()),
        };
        self.fail(enqueued)
    }

    fn product(&self) -> Result<(), CudaError> {
        let gathers = self.spec.collective == GemmCollective::AllGather;
        let (a, d) = if gathers { (&self.whole, &self.y) } else { (&self.x, &self.whole) };
        let d = [d.address()];
        let tensors =
            GemmTensors { a: &[a.address()], b: self.weight.address(), d: &d, bias: 0, counters: &[] };
        // SAFETY: the tensors are those of the spec and live as long as this value; they are freed after what is enqueued.
        unsafe { self.library.launch(&self.stream, &tensors) }
    }

    fn collective(&self) -> Result<(), CudaError> {
        let GemmCollectiveSpec { collective, ranks, m, n, k, .. } = self.spec;
        let (x, whole, y) = (self.x.address(), self.whole.address(), self.y.address());
        let (kind, from, to, count) = match collective {
            GemmCollective::AllGather => (NcclCollective::AllGather, x, whole, m / ranks * k),
            GemmCollective::ReduceScatter => (NcclCollective::ReduceScatter, whole, y, m / ranks * n),
            GemmCollective::AllReduce => (NcclCollective::AllReduce, whole, y, m * n),
        };
        let nccl = &self.bench.nccl[self.rank];
        // SAFETY: as above.
        unsafe { nccl.collective(&self.stream, kind, self.element, from, to, count) }
    }

    fn finish(&mut self, contender: Contender) -> Result<(), ExecError> {
        if let Contender::Program(index) = contender {
            return self.programs[index].finish().map(|_| ());
        }
        let began = Instant::now();
        while !self.fail(self.stream.is_idle())? {
            if began.elapsed() > self.bench.limit {
                let reason = format!("NCCL did not end in {:.3} s", self.bench.limit.as_secs_f64());
                return self.fail(Err(CudaError::Transport { transport: "nccl", reason }));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// A row of the result.
    fn row(&self, row: usize) -> Result<Vec<f32>, CudaError> {
        let (n, offset) = (self.spec.n, row * self.spec.n * self.element.bytes());
        Ok(match self.element {
            ElementType::Bf16 => {
                self.y.download::<bf16>(&self.stream, offset, n)?.into_iter().map(f32::from).collect()
            }
            ElementType::F16 => {
                self.y.download::<f16>(&self.stream, offset, n)?.into_iter().map(f32::from).collect()
            }
        })
    }
}

fn weight_seed(rank: usize) -> u64 {
    2 * SEED + rank as u64
}

/// An element as f64 has it, and what it may err.
struct Expected {
    right: f64,
    /// Of every rank's share: its magnitude and the squares of its terms.
    shares: Vec<(f64, f64)>,
}

impl Expected {
    /// Shares are rounded, then their sum is.
    fn bound(&self, scalar: crate::kernel::Scalar, spec: &GemmCollectiveSpec) -> f64 {
        let share = |&(magnitude, squares): &(f64, f64)| element_bound(scalar, magnitude, squares, spec.k);
        let shares: f64 = self.shares.iter().map(share).sum();
        match spec.collective {
            GemmCollective::AllGather => shares,
            // What is rounded at the end has the shares' errors in it.
            _ => shares + element_bound(scalar, self.right.abs() + shares, 0.0, spec.ranks),
        }
    }
}

/// The element of `row`, counted in the result of `rank`.
fn expected(
    spec: &GemmCollectiveSpec,
    element: ElementType,
    rank: usize,
    row: usize,
    column: usize,
) -> Expected {
    let GemmCollectiveSpec { collective, ranks, m, k, .. } = *spec;
    let value = |seed, row: usize, column: usize| {
        f64::from(RandomFill::value(element.scalar(), seed, (row * k + column) as u64))
    };
    let share = |x_seed: u64, x_row: usize, weight: usize| {
        let (mut right, mut squares) = (0.0, 0.0);
        for term in 0..k {
            let product = value(x_seed, x_row, term) * value(weight_seed(weight), column, term);
            right += product;
            squares += product * product;
        }
        (right, squares)
    };
    let own = m / ranks;
    let shares: Vec<(f64, f64)> = match collective {
        GemmCollective::AllGather => vec![share(SEED + (row / own) as u64, row % own, rank)],
        GemmCollective::ReduceScatter => {
            (0..ranks).map(|peer| share(SEED + peer as u64, rank * own + row, peer)).collect()
        }
        GemmCollective::AllReduce => (0..ranks).map(|peer| share(SEED + peer as u64, row, peer)).collect(),
    };
    Expected {
        right: shares.iter().map(|share| share.0).sum(),
        shares: shares.iter().map(|&(right, squares)| (right.abs(), squares)).collect(),
    }
}

#[derive(Clone, Copy, Default)]
struct Sums {
    errors: f64,
    squares: f64,
    of_bound: f64,
}

impl Sums {
    fn add(&mut self, found: f64, right: f64, bound: f64) {
        let error = (found - right).abs();
        self.errors += error * error;
        self.squares += right * right;
        let of_bound = error / bound;
        self.of_bound = if of_bound <= self.of_bound { self.of_bound } else { of_bound };
    }
}

struct Judged {
    relative: f64,
    of_bound: f64,
}

/// Where the ranks' threads wait for each other, but not longer than the limit and not for one that has failed.
struct Meeting {
    ranks: usize,
    limit: Duration,
    state: Mutex<MeetingState>,
    changed: Condvar,
}

#[derive(Default)]
struct MeetingState {
    round: u64,
    here: usize,
    given_up: bool,
}

impl Meeting {
    fn new(ranks: usize, limit: Duration) -> Self {
        Self { ranks, limit, state: Mutex::default(), changed: Condvar::new() }
    }

    fn give_up(&self) {
        lock(&self.state).given_up = true;
        self.changed.notify_all();
    }

    fn wait(&self, rank: usize) -> Result<(), ExecError> {
        let mut state = lock(&self.state);
        let round = state.round;
        state.here += 1;
        if state.here == self.ranks {
            (state.here, state.round) = (0, round + 1);
            self.changed.notify_all();
            return Ok(());
        }
        let waiting = |state: &mut MeetingState| state.round == round && !state.given_up;
        let waited = self.changed.wait_timeout_while(state, self.limit, waiting);
        let (state, timeout) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        if state.round != round {
            return Ok(());
        }
        let reason = match timeout.timed_out() {
            true => format!("another rank did not come in {:.3} s", self.limit.as_secs_f64()),
            false => "another rank has failed".to_owned(),
        };
        Err(ExecError::Device { rank, place: "a benchmark".to_owned(), reason })
    }
}
