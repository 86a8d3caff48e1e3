//! The CUDA backend: a rank is a set of streams on a device. Several ranks may share one.

mod attention;
mod attention_backward;
mod attention_finish;
mod buffer;
mod clock;
mod compute;
mod cost;
mod counters;
mod exchange_marks;
mod graph_run;
mod keys;
mod linear;
mod machine;
mod matrix_rows;
mod norm;
mod padding;
mod pass_order;
mod process;
mod signal;
mod start_line;
mod stream;
mod user_kernel;
mod waves;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::{Awaited, Backend, Blocker, ExecError, HostData, HostTensor, OpPlace, World};
use counterpoint_plan::DType;
use counterpoint_schedule::{
    BufferSpec, HardwareQueues, Mover, OverlapPolicy, Program, Span, SpanKind, StreamKind, StreamSpec,
    WorkerShare,
};

pub(crate) use attention_backward::Backward;
pub use buffer::CudaBuffer;
pub use compute::CudaKernel;
pub use counters::CudaBarrier;
pub use graph_run::GraphRun;
pub use machine::{CudaMachine, Timing};
pub(crate) use pass_order::PassOrder;
pub use process::CudaProcess;
pub use signal::CudaSignal;
pub use stream::CudaStream;
pub(crate) use stream::SpanStart;

use clock::{Clock, RunClock};
pub(crate) use counters::lock;
pub(crate) use exchange_marks::ExchangeMarks;
use exchange_marks::LastCalls;
use start_line::StartLine;

use crate::kernel::{LinkEnd, LinkStep, MissedRank, MissedSignal, MissedTurn, UserKernelSource};
use crate::partition::{Part, Partition};
use crate::{CudaError, Device, DeviceBuffer, Event, Stream, StreamPriority};

/// Users' own kernels, by name.
type UserKernels = Arc<HashMap<String, UserKernelSource>>;

/// One rank of the CUDA backend.
#[derive(Clone)]
pub struct CudaBackend(Arc<Rank>);

struct Rank {
    world: Arc<World>,
    rank: usize,
    device: Device,
    /// For uploads and downloads; nothing of a run is on it.
    setup: Stream,
    timing: Timing,
    clock: Arc<Clock>,
    run: Mutex<Option<RunClock>>,
    /// A graph takes no times, and what is captured does not run now.
    capturing: AtomicBool,
    /// Waits on the device that may have given up, with their operations' labels.
    missed_turns: Mutex<Vec<(String, MissedTurn)>>,
    /// Likewise waits for kernels.
    signals: Mutex<Vec<CudaSignal>>,
    /// Likewise waits of kernels for other ranks.
    links: Mutex<Vec<(String, Arc<LinkEnd>)>>,
    /// And exchanges by other means, which have no limit on the device.
    exchanges: Mutex<Vec<Arc<ExchangeMarks>>>,
    last_calls: Mutex<LastCalls>,
    /// Multiprocessors of communication and of computation, where the policy parts them.
    partition: Mutex<Option<Arc<Partition>>>,
    /// Multiprocessors that computation leaves to communication; 0 where the policy says nothing of it.
    margin: AtomicU32,
    /// Users' own kernels, by name.
    user_kernels: UserKernels,
    /// What faults strike: the Program that runs, and how many runs there were.
    program: Mutex<(String, u64)>,
    start_line: StartLine,
}

impl CudaBackend {
    fn new(
        world: &Arc<World>,
        rank: usize,
        device: &Device,
        timing: Timing,
        clock: Arc<Clock>,
        user_kernels: UserKernels,
    ) -> Result<Self, ExecError> {
        let setup = Stream::new(device, StreamPriority::High)
            .map_err(|error| exec_error(rank, "the start of a rank", error))?;
        Ok(Self(Arc::new(Rank {
            world: world.clone(),
            rank,
            device: device.clone(),
            setup,
            timing,
            clock,
            run: Mutex::new(None),
            capturing: AtomicBool::new(false),
            missed_turns: Mutex::default(),
            signals: Mutex::default(),
            links: Mutex::default(),
            exchanges: Mutex::default(),
            last_calls: Mutex::default(),
            partition: Mutex::default(),
            margin: AtomicU32::new(0),
            user_kernels,
            program: Mutex::default(),
            start_line: StartLine::default(),
        })))
    }

    /// What the ranks share.
    pub fn world(&self) -> &Arc<World> {
        &self.0.world
    }

    /// The rank's device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// A stream with nothing of a run on it, for uploads that are waited for.
    pub(crate) fn setup(&self) -> &Stream {
        &self.0.setup
    }

    /// A kernel that a user has given the machine.
    fn user_kernel(&self, name: &str) -> Option<&UserKernelSource> {
        self.0.user_kernels.get(name)
    }

    /// Whether operations take times.
    pub(crate) fn timed(&self) -> bool {
        self.0.timing == Timing::Spans && !self.is_capturing()
    }

    /// Multiprocessors that the policy leaves to communication. A kernel that takes more holds up the computation after it, whose
    /// blocks all want to start at once.
    pub(crate) fn left_to_communication(&self) -> Option<u32> {
        Some(self.0.margin.load(Ordering::Relaxed)).filter(|margin| *margin > 0)
    }

    /// Whether operations go into a graph instead of running.
    pub(crate) fn is_capturing(&self) -> bool {
        self.0.capturing.load(Ordering::Relaxed)
    }

    pub(crate) fn error(&self, place: &dyn std::fmt::Display, error: CudaError) -> ExecError {
        exec_error(self.0.rank, &place.to_string(), error)
    }

    /// Lets injected faults strike an operation that is about to be enqueued on `stream`.
    pub(crate) fn strike(&self, stream: &CudaStream, place: &OpPlace) -> Result<(), ExecError> {
        let Rank { world, rank, program, .. } = &*self.0;
        if world.config().faults.is_empty() {
            return Ok(());
        }
        let (name, runs) = lock(program).clone();
        // Those who wait for this rank meanwhile ask what it does.
        stream.status().begin(place);
        world.strike(*rank, &name, place, runs)
    }

    /// Enqueues an operation; a failed world takes none.
    fn enqueue(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        kind: SpanKind,
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<(), ExecError> {
        self.strike(stream, place)?;
        self.0.world.check()?;
        // This thread may be new to the device, and a launcher that encodes a tensor map needs a current context.
        self.0.device.bind().map_err(|error| self.error(place, error))?;
        stream.enqueue(place, kind, self.timed(), work).map_err(|error| self.error(place, error))
    }

    /// Waits until `stream` is idle, for `limit` at most.
    fn wait_until_idle(&self, stream: &CudaStream, began: Instant) -> Result<(), ExecError> {
        let Rank { world, rank, .. } = &*self.0;
        // Longer than any wait on the host while operations are enqueued: those know better what they waited for.
        let limit = world.config().limit.saturating_add(world.config().limit / 16);
        loop {
            let place = format!("the end of a run on stream {}", stream.status().name);
            if stream.queue().is_idle().map_err(|error| self.error(&place, error))? {
                return world.check();
            }
            world.check()?;
            let waited = began.elapsed();
            if waited > limit {
                let stall = match self.exchange_under_way() {
                    Some(exchange) => exchange.stalled(self, began),
                    None => {
                        let awaited = Awaited {
                            name: format!("stream {} of {:?}", stream.status().name, self.0.device),
                            evidence: "the device has not finished what was enqueued there".to_owned(),
                            blocker: None::<Blocker>,
                        };
                        world.stalled(*rank, place, began, awaited)
                    }
                };
                return Err(world.fail(stall));
            }
            // Short runs are watched closely, long ones leave the core to others.
            if waited < CLOSE_WATCH { std::hint::spin_loop() } else { thread::sleep(PAUSE) }
        }
    }

    /// Has the end of every run ask whether a turn was missed.
    fn watch(&self, label: String, missed_turn: MissedTurn) {
        lock(&self.0.missed_turns).push((label, missed_turn));
    }

    /// Has the end of every run ask whether a rank was waited for in vain.
    pub(crate) fn watch_link(&self, label: String, link: Arc<LinkEnd>) {
        lock(&self.0.links).push((label, link));
    }

    /// Has a wait that reaches its limit ask whether this exchange is what it waits for.
    pub(crate) fn watch_exchange(&self, exchange: Arc<ExchangeMarks>) {
        lock(&self.0.exchanges).push(exchange);
    }

    /// Whether all ranks that kernels waited for have come.
    fn check_links(&self, began: Instant) -> Result<(), ExecError> {
        let Rank { world, rank, links, exchanges, .. } = &*self.0;
        for (label, link) in lock(links).iter() {
            let missed = link.missed().map_err(|error| self.error(label, error))?;
            let Some(MissedRank { rank: awaited, step, seen, wanted }) = missed else { continue };
            let of_call =
                |what: &str| format!("rank {awaited} has {what} call {seen} of it, and not call {wanted}");
            let evidence = match step {
                LinkStep::Begin => of_call("begun"),
                LinkStep::Pass => of_call("read or written this rank's rows in"),
                LinkStep::Send => of_call("sent all of its rows in"),
                LinkStep::Deliver => {
                    format!("rank {awaited} has delivered {seen} parts of its rows, and not part {wanted}")
                }
            };
            let awaited =
                Awaited { name: format!("rank {awaited}"), evidence, blocker: Some(Blocker::Rank(awaited)) };
            return Err(world.stalled(*rank, label.clone(), began, awaited));
        }
        // Those that nobody else holds belong to calls that were made once.
        lock(links).retain(|(_, link)| Arc::strong_count(link) > 1);
        lock(exchanges).retain(|exchange| Arc::strong_count(exchange) > 1);
        Ok(())
    }

    /// Whether all kernels that raise signals have.
    fn check_signals(&self, began: Instant) -> Result<(), ExecError> {
        let Rank { world, rank, signals, .. } = &*self.0;
        lock(signals).retain(CudaSignal::is_used);
        for signal in lock(signals).iter() {
            let missed = signal.missed().map_err(|error| self.error(&"a signal", error))?;
            let Some((label, MissedSignal { seen, wanted })) = missed else { continue };
            let awaited = Awaited {
                name: format!("a kernel of {:?} that raises the signal", self.0.device),
                evidence: format!("its counter is at {seen} of {wanted}"),
                blocker: None::<Blocker>,
            };
            return Err(world.stalled(*rank, label, began, awaited));
        }
        Ok(())
    }

    /// Whether every wait on the device came to its end.
    fn check_turns(&self) -> Result<(), ExecError> {
        let Rank { rank, setup, missed_turns, .. } = &*self.0;
        for (label, missed_turn) in lock(missed_turns).iter() {
            if missed_turn.is_set(setup).map_err(|error| self.error(label, error))? {
                let reason = "a key tile waited in vain for its turn to add to dq, which is wrong now; run without \
                              deterministic mode, and report this mask";
                return Err(ExecError::Device {
                    rank: *rank,
                    place: format!("`{label}`"),
                    reason: reason.to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// What of a policy this backend cannot do. Streams of communication have the high priority whatever the policy, a margin is
/// the launchers' business; `connections` is what the driver was told.
fn policy_check(policy: &OverlapPolicy, connections: Option<&str>) -> Result<(), &'static str> {
    match policy {
        OverlapPolicy { mover: Mover::CopyEngine, .. } => {
            Err("this transport moves rows by kernels; leave copy-engine out")
        }
        OverlapPolicy { queues: HardwareQueues::Single, .. } if connections != Some("1") => Err(
            "the driver reads CUDA_DEVICE_MAX_CONNECTIONS when the program starts; set it to 1 and start again",
        ),
        _ => Ok(()),
    }
}

/// How long the end of a run is awaited by asking again and again.
const CLOSE_WATCH: Duration = Duration::from_millis(2);
/// Between questions after that.
const PAUSE: Duration = Duration::from_micros(50);

/// An error of the driver or the compiler as one of a run.
pub(crate) fn exec_error(rank: usize, place: &str, error: CudaError) -> ExecError {
    match error {
        CudaError::OutOfMemory { bytes, free, .. } => {
            ExecError::OutOfMemory { rank: Some(rank), needed: bytes as u64, available: free as u64 }
        }
        error => ExecError::Device { rank, place: place.to_owned(), reason: error.to_string() },
    }
}

impl Backend for CudaBackend {
    type Stream = CudaStream;
    type Event = Event;
    type Buffer = CudaBuffer;
    type Barrier = CudaBarrier;
    type Signal = CudaSignal;
    type Kernel = CudaKernel;

    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.world.size()
    }

    fn check_policy(&self, policy: &OverlapPolicy) -> Result<(), ExecError> {
        let refused = |reason| ExecError::Policy { rank: self.0.rank, policy: policy.to_string(), reason };
        policy_check(policy, crate::environment::max_connections().as_deref())
            .map_err(|reason| refused(reason.to_owned()))?;
        self.0.margin.store(policy.sm_margin().try_into().unwrap_or(u32::MAX), Ordering::Relaxed);
        *lock(&self.0.partition) = match policy.workers {
            WorkerShare::Common | WorkerShare::Margin(_) => None,
            WorkerShare::Partition(workers) => {
                let partition = Partition::new(&self.0.device, workers.try_into().unwrap_or(u32::MAX));
                let hint = "use sm-margin=N";
                Some(Arc::new(
                    partition
                        .map_err(|error| refused(format!("this GPU cannot be parted ({error}); {hint}")))?,
                ))
            }
        };
        Ok(())
    }

    fn available_memory(&self) -> Option<u64> {
        self.0.device.memory().ok().map(|memory| memory.free as u64)
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<CudaBuffer, ExecError> {
        let memory = DeviceBuffer::new(&self.0.device, spec.bytes() as usize);
        memory
            .and_then(|memory| CudaBuffer::new(memory, &spec.shape, spec.dtype))
            .map_err(|error| self.error(&format_args!("the allocation of {}", spec.name), error))
    }

    fn view(&self, memory: &CudaBuffer, spec: &BufferSpec) -> Result<CudaBuffer, ExecError> {
        CudaBuffer::new(memory.memory().clone(), &spec.shape, spec.dtype)
            .map_err(|error| self.error(&format_args!("the memory of {}", spec.name), error))
    }

    fn upload(&self, name: &str, tensor: HostTensor) -> Result<CudaBuffer, ExecError> {
        let setup = &self.0.setup;
        let memory = match tensor.data() {
            HostData::F64(elements) => DeviceBuffer::from_slice(setup, elements),
            HostData::F32(elements) => DeviceBuffer::from_slice(setup, elements),
            HostData::Bf16(elements) => DeviceBuffer::from_slice(setup, elements),
            HostData::F16(elements) => DeviceBuffer::from_slice(setup, elements),
        };
        memory
            .and_then(|memory| CudaBuffer::new(memory, tensor.shape(), tensor.dtype()))
            .map_err(|error| self.error(&format_args!("the upload of {name}"), error))
    }

    fn download(&self, buffer: &CudaBuffer) -> Result<HostTensor, ExecError> {
        let (memory, setup, count) = (buffer.memory(), &self.0.setup, buffer.len());
        let data = match buffer.dtype() {
            DType::F64 => memory.download(setup, 0, count).map(HostData::F64),
            DType::F32 => memory.download(setup, 0, count).map(HostData::F32),
            DType::Bf16 => memory.download(setup, 0, count).map(HostData::Bf16),
            DType::F16 => memory.download(setup, 0, count).map(HostData::F16),
        };
        let data = data.map_err(|error| self.error(&"a download", error))?;
        Ok(HostTensor::new(buffer.shape().to_vec(), data))
    }

    fn layout(&self, buffer: &CudaBuffer) -> (Vec<usize>, DType) {
        (buffer.shape().to_vec(), buffer.dtype())
    }

    fn create_stream(&self, spec: &StreamSpec) -> Result<CudaStream, ExecError> {
        let (part, priority) = match spec.kind {
            StreamKind::Compute => (Part::Computation, StreamPriority::Low),
            StreamKind::Communication => (Part::Communication, StreamPriority::High),
        };
        let stream = match &*lock(&self.0.partition) {
            Some(partition) => Stream::on(partition, &self.0.device, part),
            None => Stream::new(&self.0.device, priority),
        };
        let stream = stream.map_err(|error| self.error(&format_args!("stream {}", spec.name), error))?;
        let status = self.0.world.register_stream(self.0.rank, &spec.name, spec.kind);
        Ok(CudaStream::new(stream, status))
    }

    fn create_event(&self) -> Result<Event, ExecError> {
        Event::new(&self.0.device).map_err(|error| self.error(&"an event", error))
    }

    fn create_barrier(&self) -> Result<CudaBarrier, ExecError> {
        Ok(CudaBarrier::new(&self.0.device))
    }

    fn create_signal(&self) -> Result<CudaSignal, ExecError> {
        let signal = CudaSignal::new(&self.0.setup);
        lock(&self.0.signals).push(signal.clone());
        Ok(signal)
    }

    fn prepare(&self, program: &Program, index: usize) -> Result<CudaKernel, ExecError> {
        CudaKernel::new(self, program, index)
    }

    fn begin_run(
        &self,
        program: &str,
        origin: Instant,
        barriers: &[CudaBarrier],
        signals: &[CudaSignal],
    ) -> Result<(), ExecError> {
        barriers.iter().for_each(CudaBarrier::begin_run);
        signals.iter().for_each(CudaSignal::begin_run);
        {
            let mut current = lock(&self.0.program);
            *current = (program.to_owned(), current.1 + 1);
        }
        if self.timed() {
            let clock = self.0.clock.of_run(origin, &self.0.setup);
            *lock(&self.0.run) = Some(clock.map_err(|error| self.error(&"the begin of a run", error))?);
        }
        Ok(())
    }

    fn start_together(ranks: &[(&Self, &[CudaStream])]) -> Result<(), ExecError> {
        match ranks {
            [(first, _), _, ..] if first.timed() => {
                let streams: Vec<&Stream> =
                    ranks.iter().flat_map(|(_, streams)| *streams).map(CudaStream::queue).collect();
                let held = first.0.start_line.hold(first.device(), ranks.len(), &streams);
                held.map_err(|error| first.error(&"the start of a run", error))
            }
            _ => Ok(()),
        }
    }

    fn poison(&self, buffer: &CudaBuffer) -> Result<(), ExecError> {
        if !self.0.world.config().poison || self.is_capturing() {
            return Ok(());
        }
        // All bits set are NaN in every floating-point type.
        let filled = buffer.memory().fill(&self.0.setup, 0xff);
        filled.and_then(|()| self.0.setup.synchronize()).map_err(|error| self.error(&"poisoning", error))
    }

    fn launch(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        kernel: &CudaKernel,
        buffers: &[CudaBuffer],
        signals: &[CudaSignal],
    ) -> Result<(), ExecError> {
        self.enqueue(stream, place, SpanKind::Compute, |stream| kernel.launch(stream, buffers, signals))
    }

    fn record(&self, stream: &CudaStream, place: &OpPlace, event: &Event) -> Result<(), ExecError> {
        self.strike(stream, place)?;
        self.0.world.check()?;
        event.record(stream.queue()).map_err(|error| self.error(place, error))
    }

    fn wait(&self, stream: &CudaStream, place: &OpPlace, event: &Event) -> Result<(), ExecError> {
        self.enqueue(stream, place, SpanKind::Wait, |stream| stream.wait(event))
    }

    fn await_barrier(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        barrier: &CudaBarrier,
        arrivals: u64,
    ) -> Result<(), ExecError> {
        self.enqueue(stream, place, SpanKind::Wait, |stream| barrier.wait(stream, arrivals))
    }

    fn signal(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        signal: &CudaSignal,
        value: u64,
    ) -> Result<(), ExecError> {
        self.strike(stream, place)?;
        self.0.world.check()?;
        signal.raise(stream.queue(), value).map_err(|error| self.error(place, error))
    }

    fn wait_signal(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        signal: &CudaSignal,
        value: u64,
    ) -> Result<(), ExecError> {
        let limit = self.0.world.config().limit;
        self.enqueue(stream, place, SpanKind::Wait, |stream| signal.wait(stream, value, &place.label, limit))
    }

    fn synchronize(&self, streams: &[&CudaStream]) -> Result<(), ExecError> {
        let began = Instant::now();
        let waited = streams.iter().try_for_each(|stream| self.wait_until_idle(stream, began));
        let checked = waited.and_then(|()| self.check_links(began)).and_then(|()| self.check_turns());
        let checked = checked.and_then(|()| self.check_signals(began));
        checked.map_err(|error| self.fail(error))
    }

    fn take_spans(&self, stream: &CudaStream, index: usize) -> Result<Vec<Span>, ExecError> {
        let Some(clock) = lock(&self.0.run).clone() else { return Ok(Vec::new()) };
        let spans = stream.take_spans(self.0.rank, index, &clock);
        spans
            .map_err(|error| self.error(&format_args!("the times of stream {}", stream.status().name), error))
    }

    fn fail(&self, error: ExecError) -> ExecError {
        self.0.world.fail(error)
    }
}

#[cfg(test)]
mod tests {
    use super::policy_check;

    #[test]
    fn policies_that_cannot_be_followed_are_refused() {
        let check = |policy: &str, connections| policy_check(&policy.parse().unwrap(), connections);
        for policy in ["sequential", "concurrent+priority", "kernel-barrier+sm-margin=8", "partition=8"] {
            assert_eq!(check(policy, None), Ok(()));
        }
        assert_eq!(check("single-connection", Some("1")), Ok(()));
        for (policy, connections) in
            [("single-connection", None), ("single-connection", Some("8")), ("copy-engine", None)]
        {
            assert!(check(policy, connections).is_err(), "{policy}");
        }
    }
}
