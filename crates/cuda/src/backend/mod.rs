//! The CUDA backend: a rank is a set of streams on a device. Several ranks may share one.

mod arriving;
mod attention;
mod attention_backward;
mod attention_finish;
mod attention_problem;
mod borrowed;
mod buffer;
pub(crate) mod clock;
mod compute;
mod counter_waits;
mod counters;
mod exchange_marks;
mod graph_run;
mod grouped;
mod grouped_gradient;
mod grouped_places;
mod keys;
mod linear;
mod matrix_rows;
mod norm;
mod options;
mod padding;
mod pass_order;
mod policy;
mod ranges;
pub(crate) mod rank;
mod row_lists;
mod signal;
pub(crate) mod start_gate;
mod stream;
mod tables;
mod user_kernel;
mod watch;
mod waves;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counterpoint_exec::{
    Awaited, Backend, BufferAccess, DeviceFault, ExecError, HostData, HostTensor, OpPlace, Profiler,
    RunContext, TensorFault,
};
use counterpoint_plan::DType;
use counterpoint_schedule::{
    BufferRole, BufferSpec, OverlapPolicy, Program, SignalId, Span, SpanKind, StreamKind, StreamSpec,
};

pub(crate) use attention_backward::Backward;
use attention_problem::OperationOf;
pub use buffer::CudaBuffer;
pub use compute::CudaKernel;
pub use counters::CudaBarrier;
pub use graph_run::GraphRun;
pub use options::{PlainProducts, Timing};
pub use pass_order::{PassOrder, Passes};
pub use rank::CudaBackend;
use signal::ArrivalWords;
pub use signal::CudaSignal;
pub use stream::CudaStream;
pub(crate) use stream::SpanStart;
pub use tables::CudaTables;

pub(crate) use counter_waits::RaisedCounter;
pub(crate) use exchange_marks::{CallMarks, ExchangeMarks};

use crate::sync::lock;
use crate::{CudaError, DescribedGpu, DeviceBuffer, Event, Stream};
use counterpoint_driver::Part;

/// An error of the driver or the compiler as one of a run.
pub fn exec_error(rank: usize, place: &str, error: CudaError) -> ExecError {
    match error {
        CudaError::OutOfMemory { bytes, free, .. } => {
            ExecError::OutOfMemory { rank: Some(rank), needed: bytes as u64, available: free as u64 }
        }
        error => {
            let reason = DeviceFault::call(error);
            ExecError::Device { rank, place: place.to_owned(), reason }
        }
    }
}

impl Backend for CudaBackend {
    type Stream = CudaStream;
    type Event = Event;
    type Buffer = CudaBuffer;
    type Barrier = CudaBarrier;
    type Signal = CudaSignal;
    type Kernel = CudaKernel;
    type Device = DescribedGpu;

    fn described(&self) -> DescribedGpu {
        DescribedGpu::of(&self.0.device)
    }

    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.world.size()
    }

    fn within<R>(&self, work: impl FnOnce() -> Result<R, ExecError>) -> Result<R, ExecError> {
        // Every entry into the driver would set the device's context in a thread that has none, and take it back.
        let _bound = self.0.device.make_current();
        let _bound = _bound.map_err(|error| self.fail(self.error(&"the begin of a call", error)))?;
        work()
    }

    fn check_policy(&self, policy: &OverlapPolicy) -> Result<(), ExecError> {
        self.can_follow(policy)
    }

    fn available_memory(&self, needed: u64) -> Option<u64> {
        let free = self.0.device.memory().ok()?.free as u64;
        let lent = if free < needed { self.0.device.lendable_memory() } else { 0 };
        Some(free + lent)
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<CudaBuffer, ExecError> {
        let begin = |memory: DeviceBuffer| {
            if spec.role == BufferRole::Persistent {
                memory.fill(&self.0.setup, 0)?;
                self.0.setup.synchronize()?;
            }
            CudaBuffer::new(memory, &spec.shape, spec.dtype)
        };
        let memory = DeviceBuffer::new(&self.0.device, spec.bytes() as usize);
        memory
            .and_then(begin)
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

    fn upload_repeated(&self, spec: &BufferSpec, elements: &HostTensor) -> Result<CudaBuffer, ExecError> {
        let buffer = self.allocate(spec)?;
        let few = self.upload(&spec.name, elements.some_rows(0..elements.len().min(buffer.len())))?;
        let filled = buffer.memory().repeat(&self.0.setup, few.memory());
        // What is copied from goes when this returns.
        let filled = filled.and_then(|()| self.0.setup.synchronize());
        filled.map_err(|error| self.error(&format_args!("the upload of {}", spec.name), error))?;
        Ok(buffer)
    }

    fn download(&self, buffer: &CudaBuffer) -> Result<HostTensor, ExecError> {
        self.download_rows(buffer, 0..buffer.shape()[0])
    }

    fn download_rows(&self, buffer: &CudaBuffer, rows: Range<usize>) -> Result<HostTensor, ExecError> {
        let (memory, setup, row) =
            (buffer.memory(), &self.0.setup, buffer.shape()[1..].iter().product::<usize>());
        let (first, count) = (rows.start * row * buffer.dtype().size(), rows.len() * row);
        let data = match buffer.dtype() {
            DType::F64 => memory.download(setup, first, count).map(HostData::F64),
            DType::F32 => memory.download(setup, first, count).map(HostData::F32),
            DType::Bf16 => memory.download(setup, first, count).map(HostData::Bf16),
            DType::F16 => memory.download(setup, first, count).map(HostData::F16),
        };
        let data = data.map_err(|error| self.error(&"a download", error))?;
        Ok(HostTensor::new([&[rows.len()], &buffer.shape()[1..]].concat(), data))
    }

    fn layout(&self, buffer: &CudaBuffer) -> (Vec<usize>, DType) {
        (buffer.shape().to_vec(), buffer.dtype())
    }

    fn has_layout(&self, buffer: &CudaBuffer, shape: &[usize], dtype: DType) -> bool {
        buffer.shape() == shape && buffer.dtype() == dtype
    }

    fn overlap(&self, a: &CudaBuffer, b: &CudaBuffer) -> bool {
        borrowed::overlap(a, b)
    }

    fn is_dense(&self, buffer: &CudaBuffer) -> bool {
        buffer.strides().is_none()
    }

    fn takes_strided(&self, program: &Program, index: usize) -> bool {
        self.takes_strides(program, index)
    }

    fn check_buffer(&self, name: &str, buffer: &CudaBuffer, _access: BufferAccess) -> Result<(), ExecError> {
        let (own, other) = (self.device(), buffer.memory().device());
        if own == other {
            return Ok(());
        }
        let (on, own) = (other.to_string(), own.to_string());
        Err(ExecError::tensor(name, TensorFault::Device { on, rank: self.0.rank, own }))
    }

    fn create_stream(&self, spec: &StreamSpec, policy: &OverlapPolicy) -> Result<CudaStream, ExecError> {
        let part = match spec.kind {
            StreamKind::Compute => Part::Computation,
            StreamKind::Communication => Part::Communication,
        };
        let priority = policy::stream_priority(spec.kind, policy.priority);
        let stream = match self.partition(policy)? {
            Some(partition) => Stream::on(&partition, &self.0.device, part),
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
        let barrier = CudaBarrier::new(&self.0.setup);
        self.watch_counters(barrier.counter_waits());
        Ok(barrier)
    }

    fn create_signal(&self, program: &Program, signal: SignalId) -> Result<CudaSignal, ExecError> {
        let values = self.awaited_inside(program, signal).unwrap_or(0);
        let words = (values > 0).then(|| ArrivalWords::new(&self.0.setup, values)).transpose();
        let words = words.map_err(|error| self.error(&"words of a signal", error))?;
        let signal = CudaSignal::new(&self.0.setup, words);
        self.watch_counters(signal.counter_waits());
        Ok(signal)
    }

    fn gathering_uploads(&self) -> Self {
        self.with_gathered_uploads()
    }

    fn send_uploads(&self) -> Result<(), ExecError> {
        self.setup().send_gathered().map_err(|error| self.error(&"an upload of tables", error))?;
        self.publish_lists();
        Ok(())
    }

    fn prepare(
        &self,
        program: &Program,
        index: usize,
        tables: &CudaTables,
        scratch: &mut Vec<BufferSpec>,
    ) -> Result<CudaKernel, ExecError> {
        CudaKernel::new(self, OperationOf { program, index }, tables, scratch)
    }

    fn check(&self) -> Result<(), ExecError> {
        self.poll()
    }

    fn begin_run(
        &self,
        run: &RunContext<'_>,
        barriers: &[CudaBarrier],
        signals: &[CudaSignal],
    ) -> Result<(), ExecError> {
        barriers.iter().for_each(CudaBarrier::begin_run);
        signals.iter().for_each(CudaSignal::begin_run);
        {
            let mut current = lock(&self.0.program);
            current.1 += 1;
            if !self.0.world.config().faults.is_empty() {
                current.0 = run.program.to_owned();
            }
        }
        self.0.margin.store(run.policy.sm_margin().try_into().unwrap_or(u32::MAX), Ordering::Relaxed);
        *lock(&self.0.times) = run.times;
        if self.takes_times() {
            let clock = self.0.clock.of_run(run.origin, &self.0.setup);
            *lock(&self.0.run) = Some(clock.map_err(|error| self.error(&"the begin of a run", error))?);
        }
        Ok(())
    }

    fn start_together(ranks: &[(&Self, &[Arc<CudaStream>])]) -> Result<(), ExecError> {
        match ranks {
            [(first, _), ..] if first.takes_times() => {
                let streams: Vec<&Stream> =
                    ranks.iter().flat_map(|(_, streams)| *streams).map(|stream| stream.queue()).collect();
                let held = first.0.start_gate.hold(first.device(), ranks.len(), &streams);
                held.map_err(|error| first.error(&"the start of a run", error))
            }
            _ => Ok(()),
        }
    }

    fn mark_begin(&self, streams: &[Arc<CudaStream>]) -> Result<(), ExecError> {
        let Some(first) = streams.first().filter(|_| self.times_whole_runs()) else { return Ok(()) };
        first.begin_run().map_err(|error| self.error(&"the begin of a run", error))
    }

    fn mark_end(&self, streams: &[Arc<CudaStream>]) -> Result<(), ExecError> {
        self.0.start_gate.enqueued();
        let Some(first) = streams.first().filter(|_| self.times_whole_runs()) else { return Ok(()) };
        first.end_run().map_err(|error| self.error(&"the end of a run", error))
    }

    fn profiler(&self) -> Option<&dyn Profiler> {
        self.0.ranges.as_deref().map(|ranges| ranges as &dyn Profiler)
    }

    fn poisons(&self) -> bool {
        self.0.world.config().poison && !self.is_capturing()
    }

    fn poison(
        &self,
        stream: &CudaStream,
        _place: &OpPlace,
        buffers: Vec<CudaBuffer>,
    ) -> Result<(), ExecError> {
        // All bits set are NaN in every floating-point type.
        let fill = |buffer: &CudaBuffer| buffer.memory().fill(stream.queue(), 0xff);
        buffers.iter().try_for_each(fill).map_err(|error| self.error(&"poisoning", error))
    }

    fn copy(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        from: &CudaBuffer,
        to: &CudaBuffer,
    ) -> Result<(), ExecError> {
        self.enqueue(stream, place, SpanKind::Compute, |stream| self.copy_tensor(stream, from, to))
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

    fn follow(&self, stream: &CudaStream, place: &OpPlace, event: &Event) -> Result<(), ExecError> {
        self.enqueue(stream, place, SpanKind::Wait, |stream| stream.follow(event))
    }

    fn is_captured(&self, event: &Event) -> bool {
        event.is_captured()
    }

    fn captures(&self, stream: &CudaStream) -> Result<bool, ExecError> {
        stream.queue().is_capturing().map_err(|error| {
            let error = if error.is_of_no_stream() { CudaError::StreamGone } else { error };
            self.error(&"a stream of the caller", error)
        })
    }

    fn wait_on_host(&self, event: &Event) -> Result<(), ExecError> {
        let began = Instant::now();
        let mut asked = began;
        let limit = self.0.world.config().limit;
        while !self.has_happened(event)? {
            self.0.world.attend(self.0.rank, &mut asked)?;
            if began.elapsed() > limit {
                let awaited = Awaited {
                    name: "the end of a call".to_owned(),
                    evidence: "its event has not happened".to_owned(),
                    blocker: None,
                };
                let place = "the end of a call".to_owned();
                return Err(self.fail(self.0.world.stalled(self.0.rank, place, began, awaited)));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        // What devices say only when they are asked.
        self.synchronize(&[])
    }

    fn has_happened(&self, event: &Event) -> Result<bool, ExecError> {
        self.poll()?;
        event.is_done().map_err(|error| self.error(&"the end of a call", error))
    }

    fn await_barrier(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        barrier: &CudaBarrier,
        arrivals: u64,
    ) -> Result<(), ExecError> {
        let limit = self.0.world.config().limit;
        let wait = |stream: &Stream| barrier.wait(stream, arrivals, &place.label, limit);
        self.enqueue(stream, place, SpanKind::Wait, wait)
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
        let checked = waited.and_then(|()| self.check_links(began)).and_then(|()| self.check_waits());
        let checked = checked.and_then(|()| self.check_counters(began));
        checked.map_err(|error| self.fail(error))
    }

    fn drain(&self, streams: &[&CudaStream]) -> bool {
        let began = Instant::now();
        streams.iter().all(|stream| self.becomes_idle(stream, began))
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
