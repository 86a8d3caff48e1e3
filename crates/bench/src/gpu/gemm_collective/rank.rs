//! One rank's side of `bench gemm-collective`: its tensors, and the contenders that it enqueues behind a gate and times.

use std::time::Instant;

use counterpoint_cost::ProblemSize;
use counterpoint_exec::{ExecError, GemmCollectiveSpec};
use counterpoint_plan::GemmCollective;
use half::{bf16, f16};

use super::host_barrier::HostBarrier;
use super::{GemmCollectiveBench, GemmCollectiveRuns, Ranked, SEED, weight_seed};
use crate::gpu::gemm::sample;
use counterpoint_cuda::exec_error;
use counterpoint_cuda::kernel::{ElementType, GemmLayout, GemmSpec, GemmTensors, LibraryGemm, RandomFill};
use counterpoint_cuda::{CudaBuffer, CudaError, DeviceBuffer, Event, Stream, StreamPriority, TransportFault};

/// Rows of each rank that are compared with f64.
const ROWS: usize = 6;
/// What keeps a device busy for some milliseconds.
const GATE_BYTES: usize = 512 << 20;
const GATE_FILLS: usize = 24;

/// One rank with its tensors and all that is timed on it.
pub(super) struct Rank<'a> {
    bench: &'a GemmCollectiveBench,
    spec: GemmCollectiveSpec,
    element: ElementType,
    rank: usize,
    programs: Vec<Ranked>,
    stream: Stream,
    /// What NCCL receives or reads as a whole: gathered rows, or partial sums.
    whole: DeviceBuffer,
    x: DeviceBuffer,
    weight: DeviceBuffer,
    y: DeviceBuffer,
    gate: DeviceBuffer,
    library: LibraryGemm,
}

/// What one rank measured.
pub(super) struct RankTimes {
    /// Of each contender and sample.
    pub(super) seconds: Vec<Vec<f64>>,
    /// Rows of the result that were taken.
    pub(super) sampled: Vec<usize>,
    /// Of each contender that has a result.
    pub(super) rows: Vec<Vec<Vec<f32>>>,
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
    pub(super) fn new(
        bench: &'a GemmCollectiveBench,
        spec: &GemmCollectiveSpec,
        element: ElementType,
        rank: usize,
        mut programs: Vec<Ranked>,
    ) -> Result<Self, CudaError> {
        let GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, n, k }, dtype } = *spec;
        let device = &bench.machine.devices()[rank];
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
                    reason: error.into(),
                })?;
            }
        }
        Ok(Self { bench, spec: *spec, element, rank, programs, stream, whole, x, weight, y, gate, library })
    }

    pub(super) fn run(
        &mut self,
        barrier: &HostBarrier,
        runs: GemmCollectiveRuns,
        mut between: Option<&mut (dyn FnMut() + Send)>,
    ) -> Result<RankTimes, ExecError> {
        let programs = (0..self.programs.len()).map(Contender::Program);
        let contenders: Vec<Contender> =
            programs.chain([Contender::Library, Contender::Product, Contender::Collective]).collect();
        let y_rows = self.y.len() / (self.spec.size.n * self.element.bytes());
        let sampled = sample(y_rows, ROWS);
        let mut rows = Vec::new();
        for &contender in &contenders[..=self.programs.len()] {
            self.fail(self.y.fill(&self.stream, 0xff).and_then(|()| self.stream.synchronize()))?;
            barrier.wait(self.rank)?;
            self.enqueue(contender)?;
            self.finish(contender)?;
            barrier.wait(self.rank)?;
            rows.push(self.fail(sampled.iter().map(|&row| self.row(row)).collect::<Result<_, _>>())?);
        }
        let device = self.stream.device().clone();
        let event = || Event::timing(&device);
        let (begin, end) = (self.fail(event())?, self.fail(event())?);
        let mut seconds = vec![Vec::new(); contenders.len()];
        for _ in 0..runs.samples {
            for (&contender, seconds) in contenders.iter().zip(&mut seconds) {
                barrier.wait(self.rank)?;
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
            barrier.wait(self.rank)?;
            if let Some(between) = &mut between {
                between();
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
        let GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, n, k }, .. } = self.spec;
        let (x, whole, y) = (self.x.address(), self.whole.address(), self.y.address());
        let (from, to, count) = match collective {
            GemmCollective::AllGather => (x, whole, m / ranks * k),
            GemmCollective::ReduceScatter => (whole, y, m / ranks * n),
            GemmCollective::AllReduce => (whole, y, m * n),
        };
        let nccl = &self.bench.nccl[self.rank];
        // SAFETY: as above.
        unsafe { nccl.collective(&self.stream, collective, self.spec.dtype, from, to, count) }
    }

    fn finish(&mut self, contender: Contender) -> Result<(), ExecError> {
        if let Contender::Program(index) = contender {
            return self.programs[index].finish().map(|_| ());
        }
        let began = Instant::now();
        while !self.fail(self.stream.is_idle())? {
            if began.elapsed() > self.bench.limit {
                let reason = TransportFault::NotEnded { limit: self.bench.limit }.into();
                return self.fail(Err(CudaError::Transport { transport: "nccl", reason }));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// A row of the result.
    fn row(&self, row: usize) -> Result<Vec<f32>, CudaError> {
        let (n, offset) = (self.spec.size.n, row * self.spec.size.n * self.element.bytes());
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
