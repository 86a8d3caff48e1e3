use std::time::Instant;

use counterpoint_schedule::{BufferRole, BufferSpec, GroupCast, GroupReduce, Op, Program, Timeline};

use crate::{Backend, CollectiveCall, ExecError, GlobalBuffer, OpPlace, Transport};

/// A [`Program`] made ready to run many times on one rank: buffers allocated, streams started, every operation resolved.
///
/// The one interpreter: what differs between machines is behind [`Backend`] and [`Transport`].
pub struct Prepared<B: Backend, T: Transport<B>> {
    program: Program,
    backend: B,
    transport: T,
    streams: Vec<B::Stream>,
    events: Vec<B::Event>,
    barriers: Vec<B::Barrier>,
    signals: Vec<B::Signal>,
    /// Inputs are `None` until they are bound.
    buffers: Vec<Option<B::Buffer>>,
    /// In the order in which they are enqueued; most operations are one.
    steps: Vec<PlacedStep<B, T>>,
}

/// A step, its place and its stream.
struct PlacedStep<B: Backend, T: Transport<B>> {
    place: OpPlace,
    stream: usize,
    step: Step<B, T>,
}

/// An operation made ready.
enum Step<B: Backend, T: Transport<B>> {
    Compute(B::Kernel),
    Collective { collective: T::Collective, arrive: Option<usize>, signal: Option<usize> },
    Record(usize),
    Wait(usize),
    Await { barrier: usize, arrivals: u64 },
    Signal { signal: usize, value: u64 },
    WaitSignal { signal: usize, value: u64 },
}

impl<B: Backend, T: Transport<B>> Prepared<B, T> {
    /// Makes `program` ready: validates it, allocates its scratch and output buffers, starts its streams, and lets backend
    /// and transport prepare every operation.
    ///
    /// # Errors
    /// [`ExecError::Program`] for a Program that is not well formed, is of another rank, or has operations whose tensors do
    /// not fit; [`ExecError::BadCollective`]; [`ExecError::OutOfMemory`].
    pub fn new(program: Program, backend: B, transport: T) -> Result<Self, ExecError> {
        let own = backend.clone();
        Self::prepare(program, backend, transport, |spec| own.allocate(spec))
    }

    /// The same, whose scratch buffers are views of `memory`, which other Programs of the rank may use when this one does not
    /// run.
    ///
    /// # Errors
    /// As [`Prepared::new`].
    pub fn with_scratch(
        program: Program,
        backend: B,
        transport: T,
        memory: &mut GlobalBuffer<B>,
    ) -> Result<Self, ExecError> {
        let own = backend.clone();
        let allocate = |spec: &BufferSpec| match spec.role {
            BufferRole::Scratch => memory.view(&own, spec),
            _ => own.allocate(spec),
        };
        Self::prepare(program, backend, transport, allocate)
    }

    fn prepare(
        program: Program,
        backend: B,
        transport: T,
        allocate: impl FnMut(&BufferSpec) -> Result<B::Buffer, ExecError>,
    ) -> Result<Self, ExecError> {
        let mut prepared = Self {
            program,
            backend,
            transport,
            streams: Vec::new(),
            events: Vec::new(),
            barriers: Vec::new(),
            signals: Vec::new(),
            buffers: Vec::new(),
            steps: Vec::new(),
        };
        match prepared.make_ready(allocate) {
            Ok(()) => Ok(prepared),
            // Before the transport goes: it may wait for the other ranks, who are to hear of this first.
            Err(error) => Err(prepared.backend.fail(error)),
        }
    }

    fn make_ready(
        &mut self,
        mut allocate: impl FnMut(&BufferSpec) -> Result<B::Buffer, ExecError>,
    ) -> Result<(), ExecError> {
        self.transport.follow(&self.program.policy)?;
        let Self { program, backend, transport, .. } = &*self;
        let error =
            |reason: String| ExecError::Program { program: program.name.clone(), rank: program.rank, reason };
        for (who, rank, world_size) in [
            ("backend", backend.rank(), backend.world_size()),
            ("transport", transport.rank(), transport.world_size()),
        ] {
            if (rank, world_size) != (program.rank, program.world_size) {
                return Err(error(format!(
                    "it is for rank {} of {}, and the {who} is rank {rank} of {world_size}",
                    program.rank, program.world_size
                )));
            }
        }
        backend.check_policy(&program.policy)?;
        program.validate().map_err(|reason| error(reason.to_string()))?;
        check_names(program).map_err(&error)?;
        let needed = program.bytes(|role| !given(role));
        if let Some(available) = backend.available_memory().filter(|available| *available < needed) {
            return Err(ExecError::OutOfMemory { rank: Some(program.rank), needed, available });
        }

        let mut steps = Vec::with_capacity(program.ops.len());
        for (index, op) in program.ops.iter().enumerate() {
            let place = OpPlace { index, label: op.label.as_str().into(), stage: op.stage };
            let cast = |cast: &GroupCast| -> Result<_, ExecError> {
                let collective = transport.prepare_cast(&place, cast, &program.buffers)?;
                let (arrive, signal) = (cast.arrive, cast.delivery.map(|delivery| delivery.signal.0));
                Ok(Step::Collective { collective, arrive: arrive.map(|barrier| barrier.0), signal })
            };
            let reduce = |reduce: &GroupReduce| -> Result<_, ExecError> {
                let collective = transport.prepare_reduce(&place, reduce, &program.buffers)?;
                let arrive = reduce.arrive.map(|barrier| barrier.0);
                Ok(Step::Collective { collective, arrive, signal: None })
            };
            let stream = op.stream.0;
            let mut push = |step| steps.push(PlacedStep { place: place.clone(), stream, step });
            let step = match &op.op {
                Op::GroupCast(op) => cast(op)?,
                Op::GroupReduce(op) => reduce(op)?,
                Op::BackwardReduce(both) => {
                    let arrive = both.reduce.arrive.map(|barrier| barrier.0);
                    let signal = both.backward.arriving.map(|keys| keys.delivery.signal.0);
                    match transport.prepare_backward_reduce(backend, &place, both, program)? {
                        Some(collective) => Step::Collective { collective, arrive, signal },
                        None => {
                            push(Step::Compute(backend.prepare(program, index)?));
                            reduce(&both.reduce)?
                        }
                    }
                }
                Op::CastGemm(op) => {
                    let arrive = op.cast.arrive.map(|barrier| barrier.0);
                    match transport.prepare_cast_gemm(backend, &place, op, program)? {
                        Some(collective) => Step::Collective { collective, arrive, signal: None },
                        None => {
                            push(cast(&op.cast)?);
                            Step::Compute(backend.prepare(program, index)?)
                        }
                    }
                }
                Op::GemmReduce(op) => {
                    let arrive = op.reduce.arrive.map(|barrier| barrier.0);
                    match transport.prepare_gemm_reduce(backend, &place, op, program)? {
                        Some(collective) => Step::Collective { collective, arrive, signal: None },
                        None => {
                            push(Step::Compute(backend.prepare(program, index)?));
                            push(reduce(&op.reduce)?);
                            match &op.spread {
                                Some(spread) => cast(spread)?,
                                None => continue,
                            }
                        }
                    }
                }
                Op::Record(event) => Step::Record(event.0),
                Op::Wait(event) => Step::Wait(event.0),
                Op::Await { barrier, arrivals } => Step::Await { barrier: barrier.0, arrivals: *arrivals },
                Op::Signal { signal, value } => Step::Signal { signal: signal.0, value: *value },
                Op::WaitSignal { signal, value } => Step::WaitSignal { signal: signal.0, value: *value },
                _ => Step::Compute(backend.prepare(program, index)?),
            };
            push(step);
        }
        let mut buffers: Vec<Option<B::Buffer>> = vec![None; program.buffers.len()];
        for slot in &program.slots {
            let specs = slot.iter().map(|id| &program.buffers[id.0]);
            let Some(longest) = specs.max_by_key(|spec| spec.bytes()) else { continue };
            let memory = backend.allocate(longest)?;
            for id in slot {
                buffers[id.0] = Some(backend.view(&memory, &program.buffers[id.0])?);
            }
        }
        for (spec, buffer) in program.buffers.iter().zip(&mut buffers) {
            if !given(spec.role) && buffer.is_none() {
                *buffer = Some(allocate(spec)?);
            }
        }
        let streams =
            program.streams.iter().map(|spec| backend.create_stream(spec)).collect::<Result<_, _>>()?;
        let events = (0..program.num_events).map(|_| backend.create_event()).collect::<Result<_, _>>()?;
        let barriers =
            (0..program.num_barriers).map(|_| backend.create_barrier()).collect::<Result<_, _>>()?;
        let signals = (0..program.num_signals).map(|_| backend.create_signal()).collect::<Result<_, _>>()?;
        (self.buffers, self.steps) = (buffers, steps);
        (self.streams, self.events, self.barriers, self.signals) = (streams, events, barriers, signals);
        Ok(())
    }

    /// The Program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Its streams, in the Program's order.
    pub fn streams(&self) -> &[B::Stream] {
        &self.streams
    }

    /// Makes an input or output of the Program use the caller's memory from the next run on.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when the Program has no such input or output, or shape or element type differ.
    pub fn bind(&mut self, name: &str, buffer: B::Buffer) -> Result<(), ExecError> {
        let error = |reason| ExecError::Tensor { name: name.to_owned(), reason };
        let bound = |spec: &BufferSpec| spec.name == name && is_bound(spec.role);
        let Some(index) = self.program.buffers.iter().position(bound) else {
            let program = &self.program.name;
            return Err(error(format!("program `{program}` has no input or output of this name")));
        };
        let spec = &self.program.buffers[index];
        let (shape, dtype) = self.backend.layout(&buffer);
        if shape != spec.shape || dtype != spec.dtype {
            let (want, want_shape) = (spec.dtype, &spec.shape);
            return Err(error(format!("must be {want:?} {want_shape:?}, not {dtype:?} {shape:?}")));
        }
        self.buffers[index] = Some(buffer);
        Ok(())
    }

    /// Whether its caller gives it a tensor of this name.
    pub fn takes(&self, name: &str) -> bool {
        self.program.buffers.iter().any(|spec| given(spec.role) && spec.name == name)
    }

    /// [`Prepared::bind`] for all ranks of a process, in their order.
    ///
    /// # Errors
    /// The first of them.
    pub fn bind_ranks(ranks: &mut [Self], name: &str, buffers: &[B::Buffer]) -> Result<(), ExecError> {
        ranks.iter_mut().zip(buffers).try_for_each(|(rank, buffer)| rank.bind(name, buffer.clone()))
    }

    /// [`Prepared::buffer`] of all ranks of a process, in their order.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when there is none.
    pub fn buffers_of(ranks: &[Self], name: &str) -> Result<Vec<B::Buffer>, ExecError> {
        let missing =
            || ExecError::Tensor { name: name.to_owned(), reason: "is no output of the Program".to_owned() };
        ranks.iter().map(|rank| rank.buffer(name).cloned().ok_or_else(missing)).collect()
    }

    /// An output's buffer (or a bound input's).
    pub fn buffer(&self, name: &str) -> Option<&B::Buffer> {
        let index = self.program.buffers.iter().position(|spec| spec.name == name)?;
        self.buffers[index].as_ref()
    }

    /// Enqueues one run and returns at once. Spans are measured from `origin`, which ranks may share. The run before must
    /// have been finished.
    ///
    /// Ranks of one process may meet on the host while they enqueue: each needs a thread of its own then, or all of them
    /// [`Prepared::start_ranks`].
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when an input is not bound; the first error of any rank.
    pub fn start(&mut self, origin: Instant) -> Result<(), ExecError> {
        Self::start_ranks(std::slice::from_mut(self), origin)
    }

    /// Enqueues one run of all ranks of a process, from this thread, and returns at once.
    ///
    /// # Errors
    /// As [`Prepared::start`].
    pub fn start_ranks(ranks: &mut [Self], origin: Instant) -> Result<(), ExecError> {
        Self::poison_ranks(ranks)?;
        Self::enqueue_ranks(ranks, Self::begin_ranks(ranks, origin)?)
    }

    /// Tells every backend of a run that is about to be enqueued.
    fn begin_ranks(ranks: &[Self], origin: Instant) -> Result<Vec<Enqueue<'_, B, T>>, ExecError> {
        ranks.iter().map(|rank| Enqueue::new(rank, origin)).collect()
    }

    /// Fills what a run must write with NaN, where the backend is set to do so.
    fn poison_ranks(ranks: &[Self]) -> Result<(), ExecError> {
        ranks.iter().try_for_each(|rank| {
            let buffers = rank.program.buffers.iter().zip(&rank.buffers);
            let written = buffers.filter(|(spec, _)| begins_anew(spec.role));
            let poisoned =
                written.filter_map(|(_, buffer)| buffer.as_ref()).try_for_each(|b| rank.backend.poison(b));
            poisoned.map_err(|error| rank.backend.fail(error))
        })
    }

    /// Enqueues what every rank has before its next collective, then that collective's steps, each for all ranks, and so on. A
    /// computation of each rank in turn, so that all ranks start together.
    fn enqueue_ranks(ranks: &[Self], mut queues: Vec<Enqueue<'_, B, T>>) -> Result<(), ExecError> {
        let marked = |rank: &Self, mark: fn(&B, &[B::Stream]) -> Result<(), ExecError>| {
            mark(&rank.backend, &rank.streams).map_err(|error| rank.backend.fail(error))
        };
        ranks.iter().try_for_each(|rank| marked(rank, B::mark_begin))?;
        loop {
            let mut meetings: Vec<Option<Meeting<'_, B, T>>> = queues.iter().map(|_| None).collect();
            let mut under_way: Vec<usize> = (0..queues.len()).collect();
            while !under_way.is_empty() {
                let mut left = Vec::with_capacity(under_way.len());
                for rank in under_way {
                    match queues[rank].advance()? {
                        Reached::Computation => left.push(rank),
                        Reached::Collective(meeting) => meetings[rank] = Some(meeting),
                        Reached::End => {}
                    }
                }
                under_way = left;
            }
            let meetings = queues.iter().zip(meetings).filter_map(|(queue, met)| Some((queue, met?)));
            let mut meetings: Vec<_> = meetings.collect();
            if meetings.is_empty() {
                return ranks.iter().try_for_each(|rank| marked(rank, B::mark_end));
            }
            meetings.iter_mut().try_for_each(|(queue, meeting)| queue.fetch(meeting))?;
            meetings.into_iter().try_for_each(|(queue, meeting)| queue.end(meeting))?;
        }
    }

    /// Sleeps until the run has finished; gives what this rank measured.
    ///
    /// # Errors
    /// The first error of any rank that shares the world.
    pub fn finish(&mut self) -> Result<Timeline, ExecError> {
        self.backend.synchronize(&self.streams.iter().collect::<Vec<_>>())?;
        let spans = self.streams.iter().enumerate();
        let spans: Vec<Vec<_>> =
            spans.map(|(index, stream)| self.backend.take_spans(stream, index)).collect::<Result<_, _>>()?;
        Ok(Timeline {
            name: self.program.name.clone(),
            world_size: self.program.world_size,
            streams: self.program.streams.iter().map(|stream| stream.name.clone()).collect(),
            spans: spans.into_iter().flatten().collect(),
        })
    }

    /// Runs all ranks of one process once, side by side and measured from one origin, and waits for them.
    ///
    /// # Errors
    /// As [`Prepared::start`] and [`Prepared::finish`].
    pub fn run_ranks(ranks: &mut [Self]) -> Result<Timeline, ExecError> {
        // Poisoning takes as long as a run: first all of that, so that ranks start together.
        Self::poison_ranks(ranks)?;
        // What a backend enqueues to begin a run must not be held back: on a single hardware queue it would come behind what is.
        let queues = Self::begin_ranks(ranks, Instant::now())?;
        let streams: Vec<_> = ranks.iter().map(|rank| (&rank.backend, rank.streams.as_slice())).collect();
        B::start_together(&streams)?;
        Self::enqueue_ranks(ranks, queues)?;
        let mut whole = Timeline::default();
        for rank in ranks.iter_mut() {
            let Timeline { name, world_size, streams, spans } = rank.finish()?;
            whole.spans.extend(spans);
            whole = Timeline { name, world_size, streams, spans: whole.spans };
        }
        Ok(whole)
    }

    /// Binds inputs, runs once, and waits. Outputs are in [`Prepared::buffer`].
    ///
    /// # Errors
    /// As [`Prepared::bind`], [`Prepared::start`] and [`Prepared::finish`].
    pub fn run(&mut self, inputs: &[(&str, B::Buffer)]) -> Result<Timeline, ExecError> {
        for (name, buffer) in inputs {
            self.bind(name, buffer.clone())?;
        }
        self.start(Instant::now())?;
        self.finish()
    }
}

/// A rank's run that is being enqueued.
struct Enqueue<'a, B: Backend, T: Transport<B>> {
    rank: &'a Prepared<B, T>,
    /// Every buffer of the Program.
    table: Vec<B::Buffer>,
    /// Index of the first step that is not yet enqueued whole.
    next: usize,
}

impl<'a, B: Backend, T: Transport<B>> Enqueue<'a, B, T> {
    fn new(rank: &'a Prepared<B, T>, origin: Instant) -> Result<Self, ExecError> {
        let Prepared { program, backend, barriers, signals, buffers, .. } = rank;
        if let Some((spec, _)) = program.buffers.iter().zip(buffers).find(|(_, buffer)| buffer.is_none()) {
            let reason = "is an input and was never bound".to_owned();
            return Err(backend.fail(ExecError::Tensor { name: spec.name.clone(), reason }));
        }
        let begun = backend.begin_run(&program.name, origin, barriers, signals);
        begun.map_err(|error| backend.fail(error))?;
        Ok(Self { rank, table: buffers.iter().flatten().cloned().collect(), next: 0 })
    }

    /// Enqueues operations up to the next computation, which is, or the next collective, which it begins.
    fn advance(&mut self) -> Result<Reached<'a, B, T>, ExecError> {
        let Prepared { backend, transport, streams, events, barriers, signals, steps, .. } = self.rank;
        let mut enqueue = || {
            while let Some(PlacedStep { place, stream, step }) = steps.get(self.next) {
                let stream = &streams[*stream];
                self.next += 1;
                match step {
                    Step::Compute(kernel) => {
                        backend.launch(stream, place, kernel, &self.table, signals)?;
                        return Ok(Reached::Computation);
                    }
                    Step::Collective { collective, arrive, signal } => {
                        let barrier = arrive.map(|barrier| &barriers[barrier]);
                        let signal = signal.map(|signal| &signals[signal]);
                        let buffers = &self.table;
                        let call =
                            CollectiveCall { backend, stream, place, collective, buffers, barrier, signal };
                        let meeting = transport.begin(&call)?;
                        let meeting = Meeting { place, stream, collective, barrier, signal, meeting };
                        return Ok(Reached::Collective(meeting));
                    }
                    Step::Record(event) => backend.record(stream, place, &events[*event])?,
                    Step::Wait(event) => backend.wait(stream, place, &events[*event])?,
                    Step::Await { barrier, arrivals } => {
                        backend.await_barrier(stream, place, &barriers[*barrier], *arrivals)?;
                    }
                    Step::Signal { signal, value } => {
                        backend.signal(stream, place, &signals[*signal], *value)?;
                    }
                    Step::WaitSignal { signal, value } => {
                        backend.wait_signal(stream, place, &signals[*signal], *value)?;
                    }
                }
            }
            Ok(Reached::End)
        };
        enqueue().map_err(|error| backend.fail(error))
    }

    fn fetch(&self, meeting: &mut Meeting<'a, B, T>) -> Result<(), ExecError> {
        let Prepared { backend, transport, .. } = self.rank;
        let Meeting { place, stream, collective, barrier, signal, ref mut meeting } = *meeting;
        let buffers = &self.table;
        let call = CollectiveCall { backend, stream, place, collective, buffers, barrier, signal };
        transport.fetch(&call, meeting).map_err(|error| backend.fail(error))
    }

    fn end(&self, meeting: Meeting<'a, B, T>) -> Result<(), ExecError> {
        let Prepared { backend, transport, .. } = self.rank;
        let Meeting { place, stream, collective, barrier, signal, meeting } = meeting;
        let buffers = &self.table;
        let call = CollectiveCall { backend, stream, place, collective, buffers, barrier, signal };
        transport.end(&call, meeting).map_err(|error| backend.fail(error))
    }
}

/// How far a rank's run has been enqueued.
enum Reached<'a, B: Backend, T: Transport<B>> {
    /// Behind a computation.
    Computation,
    /// Within a collective.
    Collective(Meeting<'a, B, T>),
    End,
}

/// A collective that a rank has begun.
struct Meeting<'a, B: Backend, T: Transport<B>> {
    place: &'a OpPlace,
    stream: &'a B::Stream,
    collective: &'a T::Collective,
    barrier: Option<&'a B::Barrier>,
    signal: Option<&'a B::Signal>,
    meeting: T::Meeting,
}

/// Whether a run finds contents in such a buffer, which the caller has bound.
fn given(role: BufferRole) -> bool {
    matches!(role, BufferRole::Input | BufferRole::Updated)
}

/// Whether nothing that is in such a buffer when a run begins counts.
fn begins_anew(role: BufferRole) -> bool {
    matches!(role, BufferRole::Output | BufferRole::Scratch)
}

/// Whether the caller may give memory for such a buffer.
fn is_bound(role: BufferRole) -> bool {
    given(role) || role == BufferRole::Output
}

/// Inputs and outputs are bound by name, so names must be unique; and a tensor needs a row axis.
fn check_names(program: &Program) -> Result<(), String> {
    let mut names: Vec<&str> = program.buffers.iter().map(|spec| spec.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("two buffers are named `{}`", twice[0]));
    }
    match program.buffers.iter().find(|spec| spec.shape.is_empty()) {
        Some(spec) => Err(format!("buffer `{}` has no row axis", spec.name)),
        None => Ok(()),
    }
}
