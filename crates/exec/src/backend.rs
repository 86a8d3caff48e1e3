//! Where the operations of a rank run: the face of a device.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use counterpoint_plan::DType;
use counterpoint_schedule::{BufferSpec, OverlapPolicy, Program, SignalId, Span, StreamSpec};

use crate::{DescribedDevice, ExecError, HostTensor, OpPlace, Profiler};

/// Tables of a Program for a backend's device.
pub type TablesOf<B> = <<B as Backend>::Device as DescribedDevice>::Tables;

/// Which times runs take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunTimes {
    /// Of every operation: what a timeline needs.
    #[default]
    Operations,
    /// Of the whole, as one span on a rank's first stream. Where time stamps are operations themselves, they hold up others: on a single
    /// hardware queue one behind a product lets nothing pass until that has ended.
    Whole,
    /// None: what calls of a [`Group`](crate::Group) take, of which nobody collects times.
    Nothing,
}

/// What is the same for all operations of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunContext<'a> {
    /// Name of the Program.
    pub program: &'a str,
    /// What its Program asks of the backend.
    pub policy: &'a OverlapPolicy,
    /// What spans are measured from.
    pub origin: Instant,
    /// Which times the run takes.
    pub times: RunTimes,
}

/// How a call uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferAccess {
    /// It only reads.
    Read,
    /// It writes, and may read.
    Write,
}

/// Where the operations of one rank run: streams, events, memory and kernels.
///
/// Everything that is "enqueued" only takes its place on a stream and returns at once; nothing in a run waits for the host,
/// so that a run may become a CUDA graph. Handles are cheap to clone and may stand for borrowed memory or a borrowed
/// stream: who owns what is the backend's business. A clone of a backend is the same rank's.
pub trait Backend: Clone + Send + Sync {
    /// A queue whose operations run in order. Programs of a group share them.
    type Stream: Send + Sync;
    /// Marks a point of a stream. May be recorded once in every run.
    type Event: Clone + Send + Sync;
    /// A dense tensor.
    type Buffer: Clone + Send + Sync;
    /// Counts starts of communication operations; only grows.
    type Barrier: Clone + Send;
    /// A counter that streams raise and wait for; only grows.
    type Signal: Clone + Send;
    /// A compute operation made ready to run many times.
    type Kernel: Send;
    /// What tables of Programs depend on of its device.
    type Device: DescribedDevice;

    /// Its device as a value, by which any process can make tables for it.
    fn described(&self) -> Self::Device;

    /// This rank.
    fn rank(&self) -> usize;

    /// Does `work`, which enqueues operations of this rank from the calling thread: what each of them would set up in the thread and take
    /// back is set up once.
    ///
    /// # Errors
    /// Those of `work`; when the device does not let the thread in.
    fn within<R>(&self, work: impl FnOnce() -> Result<R, ExecError>) -> Result<R, ExecError> {
        work()
    }

    /// Ranks that run together.
    fn world_size(&self) -> usize;

    /// Whether it can do what a policy asks of a backend; the order of starts every backend can.
    ///
    /// # Errors
    /// [`ExecError::Policy`] with what it cannot do.
    fn check_policy(&self, policy: &OverlapPolicy) -> Result<(), ExecError>;

    /// Bytes that can still be allocated, where that is known; not all of them, where they are as many as `needed`.
    fn available_memory(&self, needed: u64) -> Option<u64>;

    /// A new tensor: zeros if it is [`Persistent`](counterpoint_schedule::BufferRole::Persistent), otherwise contents arbitrary.
    ///
    /// # Errors
    /// [`ExecError::OutOfMemory`] when it cannot fit.
    fn allocate(&self, spec: &BufferSpec) -> Result<Self::Buffer, ExecError>;

    /// A tensor in the memory of another one, from its first byte on, which has at least as many bytes. A write of one ends what
    /// the others held.
    ///
    /// # Errors
    /// When the memory is too short.
    fn view(&self, memory: &Self::Buffer, spec: &BufferSpec) -> Result<Self::Buffer, ExecError>;

    /// A buffer with a tensor's contents, named `name` in errors.
    ///
    /// # Errors
    /// [`ExecError::OutOfMemory`] when it cannot fit.
    fn upload(&self, name: &str, tensor: HostTensor) -> Result<Self::Buffer, ExecError>;

    /// A copy of a buffer's contents. The operations that write it must have finished.
    ///
    /// # Errors
    /// When an operation still writes it.
    fn download(&self, buffer: &Self::Buffer) -> Result<HostTensor, ExecError>;

    /// A tensor whose elements are those of `elements`, again and again: contents that need not come from the host one by one.
    ///
    /// # Errors
    /// As [`Backend::upload`].
    fn upload_repeated(&self, spec: &BufferSpec, elements: &HostTensor) -> Result<Self::Buffer, ExecError> {
        self.upload(&spec.name, elements.repeated(&spec.shape))
    }

    /// A copy of some rows of a buffer.
    ///
    /// # Errors
    /// As [`Backend::download`]; when it does not have them.
    fn download_rows(&self, buffer: &Self::Buffer, rows: Range<usize>) -> Result<HostTensor, ExecError>;

    /// Shape and element type of a buffer.
    fn layout(&self, buffer: &Self::Buffer) -> (Vec<usize>, DType);

    /// Whether a buffer has this shape and element type.
    fn has_layout(&self, buffer: &Self::Buffer, shape: &[usize], dtype: DType) -> bool {
        self.layout(buffer) == (shape.to_vec(), dtype)
    }

    /// Whether two tensors have a byte of memory in common.
    fn overlap(&self, a: &Self::Buffer, b: &Self::Buffer) -> bool;

    /// Whether operations take a tensor as it lies; where not, calls of a group copy it ([`Backend::copy`]).
    fn is_dense(&self, _buffer: &Self::Buffer) -> bool {
        true
    }

    /// Whether all operations of a Program that use the buffer of this index take it with rows and heads that lie apart.
    fn takes_strided(&self, _program: &Program, _index: usize) -> bool {
        false
    }

    /// Refuses a tensor that operations of this rank cannot use, such as one on another device.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] with the reason.
    fn check_buffer(
        &self,
        _name: &str,
        _buffer: &Self::Buffer,
        _access: BufferAccess,
    ) -> Result<(), ExecError> {
        Ok(())
    }

    /// A new stream for Programs of this policy.
    ///
    /// # Errors
    /// When the system has none left.
    fn create_stream(&self, spec: &StreamSpec, policy: &OverlapPolicy) -> Result<Self::Stream, ExecError>;

    /// A new event.
    ///
    /// # Errors
    /// When the system has none left; likewise below.
    fn create_event(&self) -> Result<Self::Event, ExecError>;

    /// A new barrier at 0.
    ///
    /// # Errors
    /// See [`Backend::create_event`].
    fn create_barrier(&self) -> Result<Self::Barrier, ExecError>;

    /// A Program's signal, at 0.
    ///
    /// # Errors
    /// See [`Backend::create_event`].
    fn create_signal(&self, program: &Program, signal: SignalId) -> Result<Self::Signal, ExecError>;

    /// The same rank, by a handle through which things are made ready whose tables go to the device together, by
    /// [`Backend::send_uploads`]; nothing runs before.
    fn gathering_uploads(&self) -> Self {
        self.clone()
    }

    /// Sends what was gathered by one copy, and waits until it is there.
    ///
    /// # Errors
    /// When the device refuses.
    fn send_uploads(&self) -> Result<(), ExecError> {
        Ok(())
    }

    /// Makes a compute operation ready by the tables of its Program: checks shapes and types, builds what every run shares. Memory that it
    /// needs while it runs it adds to `scratch`, whose first is the buffer behind the Program's last: as scratch buffers of the Program it is the rank's, which Programs
    /// share, those of a name the same.
    ///
    /// # Errors
    /// [`ExecError::Program`] when its tensors do not fit it.
    fn prepare(
        &self,
        program: &Program,
        index: usize,
        tables: &TablesOf<Self>,
        scratch: &mut Vec<BufferSpec>,
    ) -> Result<Self::Kernel, ExecError>;

    /// The first error of the world, or `Ok` while there is none: what a call asks before it enqueues anything.
    ///
    /// # Errors
    /// That error.
    fn check(&self) -> Result<(), ExecError>;

    /// Begins to enqueue a run: counts of barriers and values of signals start anew. The counters themselves go on growing, since
    /// late operations of an earlier run may still read them.
    ///
    /// # Errors
    /// When the device has failed.
    fn begin_run(
        &self,
        run: &RunContext<'_>,
        barriers: &[Self::Barrier],
        signals: &[Self::Signal],
    ) -> Result<(), ExecError>;

    /// Has all that is enqueued from now on for the `ranks` of this process start at one time, once there was time to enqueue
    /// it: on a device that runs behind its host, the rank that is enqueued first would else wait for the last one, which no
    /// rank of a training step does. Ranks of other processes too, where [`Machine::barrier`](crate::Machine::barrier) has agreed on a start with
    /// them. Nothing where operations start when they are enqueued.
    ///
    /// # Errors
    /// When the device has failed.
    fn start_together(ranks: &[(&Self, &[Arc<Self::Stream>])]) -> Result<(), ExecError>
    where
        Self: Sized,
    {
        let _ = ranks;
        Ok(())
    }

    /// Marks the begin of a run on its `streams`, before anything of it is enqueued, where the time of the whole is taken.
    ///
    /// # Errors
    /// When the device has failed.
    fn mark_begin(&self, streams: &[Arc<Self::Stream>]) -> Result<(), ExecError> {
        let _ = streams;
        Ok(())
    }

    /// Marks its end, once all of it is enqueued.
    ///
    /// # Errors
    /// When the device has failed.
    fn mark_end(&self, streams: &[Arc<Self::Stream>]) -> Result<(), ExecError> {
        let _ = streams;
        Ok(())
    }

    /// Who is notified of each operation that is enqueued, where a profiler of the device is attached.
    fn profiler(&self) -> Option<&dyn Profiler> {
        None
    }

    /// Whether what a run must write is filled with NaN before it, so that an element that no operation wrote shows.
    fn poisons(&self) -> bool;

    /// Enqueues filling buffers with NaN.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn poison(
        &self,
        stream: &Self::Stream,
        place: &OpPlace,
        buffers: Vec<Self::Buffer>,
    ) -> Result<(), ExecError>;

    /// Enqueues a copy of a tensor into another of the same shape and type.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn copy(
        &self,
        stream: &Self::Stream,
        place: &OpPlace,
        from: &Self::Buffer,
        to: &Self::Buffer,
    ) -> Result<(), ExecError>;

    /// Enqueues a compute operation. `buffers` and `signals` are the Program's tables; a kernel may raise a signal while it runs.
    ///
    /// # Errors
    /// The world's error, when it has failed; likewise below.
    fn launch(
        &self,
        stream: &Self::Stream,
        place: &OpPlace,
        kernel: &Self::Kernel,
        buffers: &[Self::Buffer],
        signals: &[Self::Signal],
    ) -> Result<(), ExecError>;

    /// Enqueues the event's next record.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn record(&self, stream: &Self::Stream, place: &OpPlace, event: &Self::Event) -> Result<(), ExecError>;

    /// What is enqueued after this starts after the event's last record that was enqueued before this.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn wait(&self, stream: &Self::Stream, place: &OpPlace, event: &Self::Event) -> Result<(), ExecError>;

    /// As [`Backend::wait`], for what other calls have recorded: where that went into a graph that somebody captures, and the stream's
    /// operations do not, there is nothing to wait for.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn follow(&self, stream: &Self::Stream, place: &OpPlace, event: &Self::Event) -> Result<(), ExecError> {
        self.wait(stream, place, event)
    }

    /// Whether the last mark of an event went into a graph that somebody captures: nothing outside of that can wait for it.
    fn is_captured(&self, _event: &Self::Event) -> bool {
        false
    }

    /// Whether what is put on a stream goes into a graph that somebody captures, and does not run now.
    ///
    /// # Errors
    /// The device's.
    fn captures(&self, _stream: &Self::Stream) -> Result<bool, ExecError> {
        Ok(false)
    }

    /// Sleeps until the event's last record has happened. Fails when nothing at all moves for the limit.
    ///
    /// # Errors
    /// The first error of the world.
    fn wait_on_host(&self, event: &Self::Event) -> Result<(), ExecError>;

    /// Whether it has; never sleeps.
    ///
    /// # Errors
    /// The first error of the world.
    fn has_happened(&self, event: &Self::Event) -> Result<bool, ExecError>;

    /// What is enqueued after this starts once `arrivals` operations have arrived in this run.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn await_barrier(
        &self,
        stream: &Self::Stream,
        place: &OpPlace,
        barrier: &Self::Barrier,
        arrivals: u64,
    ) -> Result<(), ExecError>;

    /// Enqueues raising a signal to `value`, counted from the start of the run.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn signal(
        &self,
        stream: &Self::Stream,
        place: &OpPlace,
        signal: &Self::Signal,
        value: u64,
    ) -> Result<(), ExecError>;

    /// What is enqueued after this starts once the signal is at least `value`.
    ///
    /// # Errors
    /// See [`Backend::launch`].
    fn wait_signal(
        &self,
        stream: &Self::Stream,
        place: &OpPlace,
        signal: &Self::Signal,
        value: u64,
    ) -> Result<(), ExecError>;

    /// Sleeps until all that was enqueued on `streams` has finished. Fails when nothing at all moves for the limit.
    ///
    /// # Errors
    /// The first error of the run.
    fn synchronize(&self, streams: &[&Self::Stream]) -> Result<(), ExecError>;

    /// Sleeps until nothing runs on these streams any more, also where the world has failed, for the world's limit at most. Whether it
    /// came to that: from then on no call uses its tensors.
    fn drain(&self, streams: &[&Self::Stream]) -> bool;

    /// The spans that a stream measured since they were last taken; `stream` is the index that they get. The stream must
    /// be synchronised.
    ///
    /// # Errors
    /// When the device cannot measure the times.
    fn take_spans(&self, stream: &Self::Stream, index: usize) -> Result<Vec<Span>, ExecError>;

    /// Notifies all ranks of an error, so that none waits for this one. Returns the first error that was reported, which is the
    /// one to hand on.
    fn fail(&self, error: ExecError) -> ExecError;
}
