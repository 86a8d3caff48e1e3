//! The CPU backend: streams are threads, kernels run on a pool of threads that all ranks share.

mod buffer;
mod compute;
mod counter;
mod event;
mod host_view;
mod kernel_barrier;
mod normalise;
mod signal;
mod stream;
mod user_kernel;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use counterpoint_plan::DType;
use counterpoint_schedule::{
    BufferSpec, OverlapPolicy, PolicySupport, Program, RankTransport, SignalId, Span, SpanKind, StreamSpec,
    Workload,
};
use rayon::ThreadPool;

pub use buffer::CpuBuffer;
pub(crate) use buffer::{ReadGuard, WriteGuard};
pub use compute::CpuKernel;
pub use event::CpuEvent;
pub use host_view::{HostView, MemoryKeeper};
pub use kernel_barrier::KernelBarrier;
pub use signal::CpuSignal;
use signal::SignalPoint;
pub use stream::CpuStream;
pub(crate) use stream::{ProgramPart, StreamShared};
pub(crate) use user_kernel::CpuUserKernels;
pub use user_kernel::CpuUserPart;

use crate::memory::available_memory;
use crate::monitor::lock;
use crate::world::World;
use crate::{
    Backend, BufferAccess, DescribedCpu, ExecError, HostTensor, OpPlace, PolicyFault, Profiler, RunContext,
    RunTimes,
};

/// Up to so many bytes are allocated without a look at what memory is left.
const SMALL_BYTES: u64 = 1 << 20;

/// One rank of the CPU backend.
#[derive(Clone)]
pub struct CpuBackend {
    world: Arc<World>,
    rank: usize,
    workers: Arc<ThreadPool>,
    /// `None` until the first run of a Program.
    run: Arc<Mutex<Option<Run>>>,
    user_kernels: CpuUserKernels,
    profiler: Option<Arc<dyn Profiler>>,
}

#[derive(Clone)]
struct Run {
    program: Arc<str>,
    origin: Instant,
    is_timed: bool,
}

impl CpuBackend {
    /// Rank `rank` of `world`, whose kernels run on `workers`: one pool for all ranks, so that they share the machine's
    /// cores instead of fighting for them. A pool smaller than the machine is what `sm_margin` means here.
    ///
    /// # Panics
    /// When the world has no such rank.
    pub fn new(world: &Arc<World>, rank: usize, workers: Arc<ThreadPool>) -> Self {
        assert!(rank < world.size(), "rank {rank} of a world of {}", world.size());
        let (world, user_kernels) = (world.clone(), CpuUserKernels::default());
        Self { world, rank, workers, run: Arc::default(), user_kernels, profiler: None }
    }

    /// The same, whose operations are reported to a profiler as they are enqueued.
    #[must_use]
    pub fn with_profiler(self, profiler: Arc<dyn Profiler>) -> Self {
        Self { profiler: Some(profiler), ..self }
    }

    /// The same with users' own kernels.
    pub(crate) fn with_user_kernels(self, user_kernels: CpuUserKernels) -> Self {
        Self { user_kernels, ..self }
    }

    /// A pool of as many threads as the machine has cores, less `sm_margin`, but at least one: the process's, which all groups and
    /// machines that ask for as many threads share.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives no threads.
    pub fn workers(sm_margin: usize) -> Result<Arc<ThreadPool>, ExecError> {
        Self::workers_of(1, sm_margin)
    }

    /// Likewise for one of `processes` that share the machine.
    pub(crate) fn workers_of(processes: usize, sm_margin: usize) -> Result<Arc<ThreadPool>, ExecError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        pool_of((cores / processes.max(1)).saturating_sub(sm_margin).max(1))
    }

    /// What the ranks share.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// What operations that are enqueued now belong to.
    pub(crate) fn part(&self) -> ProgramPart {
        let run = lock(&self.run).clone();
        let is_timed = run.as_ref().is_some_and(|run| run.is_timed);
        ProgramPart { program: run.map(|run| run.program), is_timed }
    }
}

/// The process's pool of so many threads. It goes with the last that uses it.
fn pool_of(threads: usize) -> Result<Arc<ThreadPool>, ExecError> {
    static POOLS: OnceLock<Mutex<HashMap<usize, Weak<ThreadPool>>>> = OnceLock::new();
    let mut pools = lock(POOLS.get_or_init(Mutex::default));
    if let Some(pool) = pools.get(&threads).and_then(Weak::upgrade) {
        return Ok(pool);
    }
    let pool = Arc::new(new_pool(threads, "worker")?);
    pools.insert(threads, Arc::downgrade(&pool));
    Ok(pool)
}

/// So many threads of this name, with a number each.
pub(crate) fn new_pool(threads: usize, name: &'static str) -> Result<ThreadPool, ExecError> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |index| format!("{name} {index}"));
    pool.build().map_err(|error| ExecError::Thread {
        rank: 0,
        stream: format!("{name}s"),
        text: error.to_string(),
    })
}

impl Backend for CpuBackend {
    type Stream = CpuStream;
    type Event = CpuEvent;
    type Buffer = CpuBuffer;
    type Barrier = KernelBarrier;
    type Signal = CpuSignal;
    type Kernel = CpuKernel;
    type Device = DescribedCpu;

    fn described(&self) -> DescribedCpu {
        DescribedCpu
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world.size()
    }

    fn check_policy(&self, policy: &OverlapPolicy) -> Result<(), ExecError> {
        let refuse = |reason: &'static str| {
            let reason = PolicyFault::CpuRanks { reason: reason.into() };
            Err(ExecError::Policy { rank: self.rank, policy: policy.to_string(), reason })
        };
        // What a layer may ask for; attention's own limits are known to whoever lowers it.
        match RankTransport::Cpu.support(policy, Workload::Linear) {
            PolicySupport::Refused(reason) => refuse(reason),
            PolicySupport::Runs | PolicySupport::WithoutEffect(_) => Ok(()),
        }
    }

    fn available_memory(&self, needed: u64) -> Option<u64> {
        // Asking reads a dozen files of the system. What is small is had, or the machine is at its end anyway.
        if needed > SMALL_BYTES { available_memory() } else { None }
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<CpuBuffer, ExecError> {
        let available = Backend::available_memory(self, spec.bytes());
        if let Some(available) = available.filter(|available| *available < spec.bytes()) {
            return Err(ExecError::OutOfMemory { rank: Some(self.rank), needed: spec.bytes(), available });
        }
        Ok(CpuBuffer::new(self.rank, &spec.name, HostTensor::zeros(spec.shape.clone(), spec.dtype)))
    }

    fn view(&self, memory: &CpuBuffer, spec: &BufferSpec) -> Result<CpuBuffer, ExecError> {
        if spec.bytes() == 0 {
            // Nobody may ever write it, and who reads it must not find another buffer's elements.
            return self.allocate(spec);
        }
        Ok(memory.reused(spec))
    }

    fn upload(&self, name: &str, tensor: HostTensor) -> Result<CpuBuffer, ExecError> {
        Ok(CpuBuffer::new(self.rank, name, tensor))
    }

    fn download(&self, buffer: &CpuBuffer) -> Result<HostTensor, ExecError> {
        buffer.tensor()
    }

    fn download_rows(&self, buffer: &CpuBuffer, rows: Range<usize>) -> Result<HostTensor, ExecError> {
        buffer.rows(rows)
    }

    fn layout(&self, buffer: &CpuBuffer) -> (Vec<usize>, DType) {
        (buffer.shape().to_vec(), buffer.dtype())
    }

    fn has_layout(&self, buffer: &CpuBuffer, shape: &[usize], dtype: DType) -> bool {
        buffer.shape() == shape && buffer.dtype() == dtype
    }

    fn overlap(&self, a: &CpuBuffer, b: &CpuBuffer) -> bool {
        a.overlaps(b)
    }

    fn is_dense(&self, buffer: &CpuBuffer) -> bool {
        buffer.is_dense()
    }

    fn check_buffer(&self, name: &str, buffer: &CpuBuffer, access: BufferAccess) -> Result<(), ExecError> {
        buffer.check_access(access).map_err(|fault| ExecError::tensor(name, fault))
    }

    fn create_stream(&self, spec: &StreamSpec, _policy: &OverlapPolicy) -> Result<CpuStream, ExecError> {
        CpuStream::new(&self.world, self.rank, &spec.name, spec.kind)
    }

    fn create_event(&self) -> Result<CpuEvent, ExecError> {
        Ok(CpuEvent::new(&self.world))
    }

    fn create_barrier(&self) -> Result<KernelBarrier, ExecError> {
        Ok(KernelBarrier::new(&self.world))
    }

    fn create_signal(&self, _: &Program, _: SignalId) -> Result<CpuSignal, ExecError> {
        Ok(CpuSignal::new(&self.world))
    }

    fn prepare(
        &self,
        program: &Program,
        index: usize,
        (): &(),
        _scratch: &mut Vec<BufferSpec>,
    ) -> Result<CpuKernel, ExecError> {
        CpuKernel::new(program, index, &self.user_kernels)
    }

    fn check(&self) -> Result<(), ExecError> {
        self.world.check()
    }

    fn begin_run(
        &self,
        run: &RunContext<'_>,
        barriers: &[KernelBarrier],
        signals: &[CpuSignal],
    ) -> Result<(), ExecError> {
        let is_timed = run.times != RunTimes::Nothing;
        *lock(&self.run) = Some(Run { program: run.program.into(), origin: run.origin, is_timed });
        barriers.iter().for_each(|barrier| barrier.0.begin_run());
        signals.iter().for_each(|signal| signal.0.begin_run());
        Ok(())
    }

    fn profiler(&self) -> Option<&dyn Profiler> {
        self.profiler.as_deref()
    }

    fn poisons(&self) -> bool {
        self.world.config().poison
    }

    fn poison(&self, stream: &CpuStream, place: &OpPlace, buffers: Vec<CpuBuffer>) -> Result<(), ExecError> {
        let (rank, at) = (self.rank, place.clone());
        // No part of the Program: neither measured nor struck by faults.
        stream.push(ProgramPart::default(), place, move |_| {
            buffers.iter().try_for_each(|buffer| {
                buffer.write(rank, &at)?.view().fill_nan();
                Ok::<(), ExecError>(())
            })?;
            Ok(None)
        })
    }

    fn copy(
        &self,
        stream: &CpuStream,
        place: &OpPlace,
        from: &CpuBuffer,
        to: &CpuBuffer,
    ) -> Result<(), ExecError> {
        let (rank, at, from, to) = (self.rank, place.clone(), from.clone(), to.clone());
        stream.push(self.part(), place, move |_| {
            buffer::copy(&from, &to, rank, &at)?;
            Ok(Some(SpanKind::Compute))
        })
    }

    fn launch(
        &self,
        stream: &CpuStream,
        place: &OpPlace,
        kernel: &CpuKernel,
        buffers: &[CpuBuffer],
        signals: &[CpuSignal],
    ) -> Result<(), ExecError> {
        let kernel = kernel.clone();
        let delivered = kernel.delivery().map(|delivery| signals[delivery.signal.0].last());
        // 0 is before anything is raised.
        let arrivals: Vec<Option<SignalPoint>> = kernel.arrivals().map_or_else(Vec::new, |arrivals| {
            let signal = &signals[arrivals.signal.0];
            arrivals.values.iter().map(|&value| (value > 0).then(|| signal.at(value))).collect()
        });
        let buffers = buffers.to_vec();
        let (workers, rank, at) = (self.workers.clone(), self.rank, place.clone());
        let raised = kernel.raises().map(|(signal, most)| {
            let counter = signals[signal.0].0.clone();
            let last = counter.issue_value(stream, place, most);
            (counter, last - most)
        });
        stream.push(self.part(), place, move |stream| {
            let delivered = || delivered.as_ref().map_or(Ok(()), |point| point.wait(stream, &at));
            let raise = |value| {
                if let Some((counter, base)) = &raised {
                    counter.raise(base + value);
                }
            };
            let arrived = |product: usize| match arrivals.get(product) {
                Some(Some(point)) => point.wait(stream, &at),
                _ => Ok(()),
            };
            kernel.run(rank, &at, &buffers, &workers, raise, &delivered, &arrived)?;
            Ok(Some(SpanKind::Compute))
        })
    }

    fn record(&self, stream: &CpuStream, place: &OpPlace, event: &CpuEvent) -> Result<(), ExecError> {
        let counter = event.0.clone();
        let number = counter.issue_step(stream, place);
        stream.push(self.part(), place, move |_| {
            counter.step_of(number);
            Ok(None)
        })
    }

    fn wait(&self, stream: &CpuStream, place: &OpPlace, event: &CpuEvent) -> Result<(), ExecError> {
        let (counter, at) = (event.0.clone(), place.clone());
        let target = counter.issued();
        stream.push(self.part(), place, move |stream| counter.wait(stream, &at, target))
    }

    fn wait_on_host(&self, event: &CpuEvent) -> Result<(), ExecError> {
        event.0.wait_on_host(&self.world, self.rank)
    }

    fn has_happened(&self, event: &CpuEvent) -> Result<bool, ExecError> {
        self.world.check()?;
        Ok(event.0.is_reached())
    }

    fn await_barrier(
        &self,
        stream: &CpuStream,
        place: &OpPlace,
        barrier: &KernelBarrier,
        arrivals: u64,
    ) -> Result<(), ExecError> {
        let (counter, at) = (barrier.0.clone(), place.clone());
        let target = counter.absolute(arrivals);
        stream.push(self.part(), place, move |stream| counter.wait(stream, &at, target))
    }

    fn signal(
        &self,
        stream: &CpuStream,
        place: &OpPlace,
        signal: &CpuSignal,
        value: u64,
    ) -> Result<(), ExecError> {
        let counter = signal.0.clone();
        let absolute = counter.issue_value(stream, place, value);
        stream.push(self.part(), place, move |_| {
            counter.raise(absolute);
            Ok(None)
        })
    }

    fn wait_signal(
        &self,
        stream: &CpuStream,
        place: &OpPlace,
        signal: &CpuSignal,
        value: u64,
    ) -> Result<(), ExecError> {
        let (counter, at) = (signal.0.clone(), place.clone());
        let target = counter.absolute(value);
        stream.push(self.part(), place, move |stream| counter.wait(stream, &at, target))
    }

    fn synchronize(&self, streams: &[&CpuStream]) -> Result<(), ExecError> {
        streams.iter().try_for_each(|stream| stream.synchronize())
    }

    fn drain(&self, streams: &[&CpuStream]) -> bool {
        let deadline = self.world.deadline();
        streams.iter().all(|stream| stream.drain(deadline))
    }

    fn take_spans(&self, stream: &CpuStream, index: usize) -> Result<Vec<Span>, ExecError> {
        let origin = lock(&self.run).as_ref().map(|run| run.origin);
        Ok(origin.map_or_else(Vec::new, |origin| stream.take_spans(origin, index)))
    }

    fn fail(&self, error: ExecError) -> ExecError {
        self.world.fail(error)
    }
}
