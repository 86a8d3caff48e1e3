//! The one interpreter of Programs: a Program made ready on a rank of a group, to run any number of times.

mod call;
mod enqueue;
mod steps;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use counterpoint_schedule::{BufferRole, BufferSpec, Program, SignalId, Timeline};

pub use self::call::Call;
use self::enqueue::Enqueue;
use self::steps::PlacedStep;
use crate::group_rank::GroupRank;
use crate::place::host_place;
use crate::{
    Backend, DescribedDevice, ExecError, OpPlace, PlanIdentity, ProgramFault, RunTimes, TablesOf,
    TensorFault, Transport,
};

/// A [`Program`] made ready to run many times on one rank of a group: every operation resolved. It has what belongs to the Program
/// only; streams, scratch memory and the connection to other ranks are the rank's.
///
/// What differs between machines is behind [`Backend`] and [`Transport`].
pub struct Prepared<B: Backend, T: Transport<B>> {
    program: Program,
    rank: Arc<GroupRank<B, T>>,
    streams: Vec<Arc<B::Stream>>,
    events: Vec<B::Event>,
    barriers: Vec<B::Barrier>,
    signals: Vec<B::Signal>,
    /// Inputs and outputs are `None` until they are bound.
    buffers: Vec<Option<B::Buffer>>,
    /// Scratch memory of further lanes, in which calls overlap those in the first.
    other_lanes: Vec<Vec<Option<B::Buffer>>>,
    /// In the order in which they are enqueued; most operations are one.
    steps: Vec<PlacedStep<B, T>>,
    /// Which times runs take that are waited for.
    times: RunTimes,
    /// How errors name the begin and the end of a call.
    edges: [OpPlace; 2],
}

impl<B: Backend, T: Transport<B>> Prepared<B, T> {
    /// Makes `program` ready on a rank that has nothing else to run, with memory for its outputs.
    ///
    /// # Errors
    /// As [`Prepared::on`].
    pub fn new(program: Program, backend: B, transport: T) -> Result<Self, ExecError> {
        let rank = GroupRank::new(backend, transport);
        let prepare = || {
            let mut prepared = Self::on(&rank, program, None)?;
            prepared.own_outputs()?;
            Ok(prepared)
        };
        // Others may be waiting for this rank already: they are to hear of it.
        prepare().map_err(|error| rank.backend().fail(error))
    }

    /// Makes `program` ready on a rank: validates it and lets backend and transport prepare every operation. Scratch buffers are views
    /// of the rank's scratch memory; inputs and outputs are the caller's. No other rank is asked for anything: what all must have
    /// alike is compared by the first collective of `plan` that is called.
    ///
    /// # Errors
    /// [`ExecError::Program`] for a Program that is not well formed, is of another rank, or has operations whose tensors do
    /// not fit; [`ExecError::BadCollective`]; [`ExecError::OutOfMemory`].
    pub fn on(
        rank: &Arc<GroupRank<B, T>>,
        program: Program,
        plan: Option<&PlanIdentity>,
    ) -> Result<Self, ExecError> {
        Self::with_room(rank, program, (plan, None), |_, _| None)
    }

    /// The same, with memory for more rows of scratch buffers, as others will need them: `room` says how many of the buffer of an index, those of
    /// kernels behind the Program's own. With a turn where ranks make Programs ready at times of their own ([`CollectiveContext::turn`](crate::CollectiveContext)).
    pub(crate) fn with_room(
        rank: &Arc<GroupRank<B, T>>,
        program: Program,
        plan: (Option<&PlanIdentity>, Option<u64>),
        room: impl Fn(usize, &BufferSpec) -> Option<usize>,
    ) -> Result<Self, ExecError> {
        let backend = rank.backend().gathering_uploads();
        let prepared = Self::gathered(rank, &backend, (program, None), plan, room)?;
        backend.send_uploads()?;
        Ok(prepared)
    }

    /// Makes Programs ready on a rank by their tables, which go to its device together.
    ///
    /// # Errors
    /// As [`Prepared::on`].
    pub(crate) fn all_on<'a>(
        rank: &Arc<GroupRank<B, T>>,
        programs: impl IntoIterator<Item = (Program, &'a TablesOf<B>)>,
        plan: &PlanIdentity,
    ) -> Result<Vec<Self>, ExecError>
    where
        TablesOf<B>: 'a,
    {
        let backend = rank.backend().gathering_uploads();
        let ready = |(program, tables)| {
            Self::gathered(rank, &backend, (program, Some(tables)), (Some(plan), None), |_, _| None)
        };
        let prepared = programs.into_iter().map(ready).collect::<Result<_, _>>()?;
        backend.send_uploads()?;
        Ok(prepared)
    }

    /// As [`Prepared::on`], whose tables, which are made where none are given, `backend` has gathered and not sent.
    fn gathered(
        rank: &Arc<GroupRank<B, T>>,
        backend: &B,
        (mut program, tables): (Program, Option<&TablesOf<B>>),
        plan: (Option<&PlanIdentity>, Option<u64>),
        room: impl Fn(usize, &BufferSpec) -> Option<usize>,
    ) -> Result<Self, ExecError> {
        rank.check()?;
        check_program(&program, rank)?;
        rank.check_memory(&program)?;
        let lanes = rank.lanes_of(&program);
        let tables = match tables {
            Some(tables) => Cow::Borrowed(tables),
            None => Cow::Owned(backend.described().tables(&program)?),
        };
        let mut scratch = Vec::new();
        let steps = steps::prepare(backend, rank.transport(), (&program, &tables), plan, &mut scratch)?;
        if !scratch.is_empty() {
            program.buffers.extend(scratch);
            rank.check_memory(&program)?;
        }
        (0..lanes).try_for_each(|lane| reserve(rank, &program, lane, &room))?;
        let buffers = own_buffers(rank, &program, 0)?;
        let other_lanes = (1..lanes).map(|lane| own_buffers(rank, &program, lane));
        let other_lanes: Vec<_> = other_lanes.collect::<Result<_, _>>()?;
        for lane in other_lanes.iter().chain([&buffers]) {
            steps::collectives(&steps).try_for_each(|one| rank.transport().publish_memory(one, lane))?;
        }
        let end = format!("the end of `{}`", program.name);
        let edges = ["the begin of a call", &end].map(|label| OpPlace::new(program.ops.len(), label));
        Ok(Self {
            edges,
            streams: rank.streams_for(&program.streams, &program.policy)?,
            events: (0..program.num_events).map(|_| backend.create_event()).collect::<Result<_, _>>()?,
            barriers: (0..program.num_barriers)
                .map(|_| backend.create_barrier())
                .collect::<Result<_, _>>()?,
            signals: (0..program.num_signals)
                .map(|signal| backend.create_signal(&program, SignalId(signal)))
                .collect::<Result<_, _>>()?,
            buffers,
            other_lanes,
            steps,
            rank: rank.clone(),
            times: RunTimes::default(),
            program,
        })
    }

    /// The Program, with the scratch memory that its kernels need behind its own buffers.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The rank that it runs on.
    pub fn group_rank(&self) -> &Arc<GroupRank<B, T>> {
        &self.rank
    }

    /// Lanes that its calls take in turn.
    fn lanes(&self) -> usize {
        1 + self.other_lanes.len()
    }

    /// Every buffer of a call in a lane; inputs and outputs that are not bound are missing.
    fn table_in(&self, lane: usize) -> Vec<Option<B::Buffer>> {
        let Some(scratch) = lane.checked_sub(1).and_then(|at| self.other_lanes.get(at)) else {
            return self.buffers.clone();
        };
        self.buffers
            .iter()
            .zip(scratch)
            .map(|(first, scratch)| scratch.as_ref().or(first.as_ref()).cloned())
            .collect()
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        self.rank.backend()
    }

    /// Its streams, in the Program's order. Other Programs of the rank have them too.
    pub fn streams(&self) -> &[Arc<B::Stream>] {
        &self.streams
    }

    /// Which times runs take from the next one on; calls ([`Call`]) take none.
    pub fn set_timing(&mut self, times: RunTimes) {
        self.times = times;
    }

    /// Gives every output that nobody has bound memory of its own.
    ///
    /// # Errors
    /// [`ExecError::OutOfMemory`].
    pub fn own_outputs(&mut self) -> Result<(), ExecError> {
        let Self { program, buffers, rank, .. } = self;
        let missing = program
            .buffers
            .iter()
            .zip(buffers)
            .filter(|(spec, buffer)| spec.role == BufferRole::Output && buffer.is_none());
        for (spec, buffer) in missing {
            *buffer = Some(rank.backend().allocate(spec)?);
        }
        Ok(())
    }

    /// Makes an input or output of the Program use the caller's memory from the next run on.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when the Program has no such input or output, or shape or element type differ.
    pub fn bind(&mut self, name: &str, buffer: B::Buffer) -> Result<(), ExecError> {
        let index = self.check_tensor(name, &buffer)?;
        let backend = self.backend();
        if !backend.is_dense(&buffer) && !backend.takes_strided(&self.program, index) {
            return Err(ExecError::tensor(name, TensorFault::Apart));
        }
        self.buffers[index] = Some(buffer);
        Ok(())
    }

    /// Where in the table an input or output of this name is, for a tensor that fits it.
    fn check_tensor(&self, name: &str, buffer: &B::Buffer) -> Result<usize, ExecError> {
        let bound = |spec: &BufferSpec| spec.name == name && is_bound(spec.role);
        let Some(index) = self.program.buffers.iter().position(bound) else {
            let program = self.program.name.clone();
            return Err(ExecError::tensor(name, TensorFault::Unknown { program }));
        };
        let spec = &self.program.buffers[index];
        if self.backend().has_layout(buffer, &spec.shape, spec.dtype) {
            return Ok(index);
        }
        let (shape, dtype) = self.backend().layout(buffer);
        if let Some(fault) = TensorFault::of_layout((spec.dtype, &spec.shape), (dtype, &shape)) {
            return Err(ExecError::tensor(name, fault));
        }
        Ok(index)
    }

    /// Whether its caller gives it a tensor of this name.
    pub fn takes(&self, name: &str) -> bool {
        self.program.buffers.iter().any(|spec| given(spec.role) && spec.name == name)
    }

    /// [`Prepared::bind`] for all ranks of a process, in their order; nothing for no ranks.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for another number of buffers than of ranks; the first of theirs.
    pub fn bind_ranks(ranks: &mut [Self], name: &str, buffers: &[B::Buffer]) -> Result<(), ExecError> {
        if !ranks.is_empty() && buffers.len() != ranks.len() {
            let (given, needed) =
                (format!("{} buffers", buffers.len()), format!("the {} ranks here", ranks.len()));
            return Err(ExecError::tensor(name, TensorFault::Count { given, needed }));
        }
        ranks.iter_mut().zip(buffers).try_for_each(|(rank, buffer)| rank.bind(name, buffer.clone()))
    }

    /// [`Prepared::buffer`] of all ranks of a process, in their order.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when there is none.
    pub fn buffers_of(ranks: &[Self], name: &str) -> Result<Vec<B::Buffer>, ExecError> {
        let missing = || ExecError::tensor(name, TensorFault::NotAnOutput);
        ranks.iter().map(|rank| rank.buffer(name).cloned().ok_or_else(missing)).collect()
    }

    /// An output's buffer (or a bound input's).
    pub fn buffer(&self, name: &str) -> Option<&B::Buffer> {
        let index = self.program.buffers.iter().position(|spec| spec.name == name)?;
        self.buffers[index].as_ref()
    }

    /// Enqueues one run and returns at once. Spans are measured from `origin`, which ranks may share. The run before must
    /// have been finished; a run that others may follow is a [`Call`].
    ///
    /// Ranks of one process may wait for each other on the host while they enqueue: each needs a thread of its own then, or all of them
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
        Self::ready_ranks(ranks)?;
        let _orders: Vec<_> = ranks.iter().map(|rank| rank.rank.order()).collect();
        Self::enqueue_ranks(ranks, Self::begin_ranks(ranks, origin)?)
    }

    /// Gives outputs memory, has the rank's earlier calls end, and fills what a run must write with NaN where the backend is set to
    /// do so.
    fn ready_ranks(ranks: &mut [Self]) -> Result<(), ExecError> {
        for rank in ranks.iter_mut() {
            rank.own_outputs().map_err(|error| rank.backend().fail(error))?;
            let ends = rank.rank.order().take_ends();
            ends.iter().try_for_each(|ended| rank.backend().wait_on_host(ended))?;
        }
        let poisoned: Vec<&Self> =
            ranks.iter().filter(|rank| rank.backend().poisons() && !rank.streams.is_empty()).collect();
        let poison = |rank: &&Self| {
            let table = rank.buffers.iter().zip(&rank.program.buffers);
            let written = table.filter(|(_, spec)| begins_anew(spec.role));
            let written = written.filter_map(|(buffer, _)| buffer.clone()).collect();
            rank.backend().poison(&rank.streams[0], &host_place(), written)
        };
        poisoned.iter().try_for_each(poison)?;
        poisoned.iter().try_for_each(|rank| rank.backend().synchronize(&[&*rank.streams[0]]))
    }

    /// Notifies every backend of a run that is about to be enqueued.
    fn begin_ranks(ranks: &[Self], origin: Instant) -> Result<Vec<Enqueue<'_, B, T>>, ExecError> {
        ranks.iter().map(|rank| Enqueue::of_bound(rank)?.begin(origin, rank.times)).collect()
    }

    /// Enqueues all of a run, whose time may be taken as a whole.
    fn enqueue_ranks(ranks: &[Self], mut queues: Vec<Enqueue<'_, B, T>>) -> Result<(), ExecError> {
        let _range = enqueue::range_of_ranks(ranks.iter());
        let failed = |rank: &Self, error| rank.backend().fail(error);
        let begin =
            |rank: &Self| rank.backend().mark_begin(&rank.streams).map_err(|error| failed(rank, error));
        let end = |rank: &Self| rank.backend().mark_end(&rank.streams).map_err(|error| failed(rank, error));
        ranks.iter().try_for_each(begin)?;
        enqueue::enqueue_all(&mut queues)?;
        ranks.iter().try_for_each(end)
    }

    /// Sleeps until the run has finished; gives what this rank measured.
    ///
    /// # Errors
    /// The first error of any rank that shares the world.
    pub fn finish(&mut self) -> Result<Timeline, ExecError> {
        let backend = self.rank.backend();
        backend.synchronize(&self.streams.iter().map(|stream| &**stream).collect::<Vec<_>>())?;
        let spans = self.streams.iter().enumerate();
        let spans: Vec<Vec<_>> =
            spans.map(|(index, stream)| backend.take_spans(stream, index)).collect::<Result<_, _>>()?;
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
        Self::ready_ranks(ranks)?;
        {
            let _orders: Vec<_> = ranks.iter().map(|rank| rank.rank.order()).collect();
            // What a backend enqueues to begin a run must not be held: on a single hardware queue it would come behind what is.
            let queues = Self::begin_ranks(ranks, Instant::now())?;
            let streams: Vec<_> =
                ranks.iter().map(|rank| (rank.backend(), rank.streams.as_slice())).collect();
            B::start_together(&streams)?;
            Self::enqueue_ranks(ranks, queues)?;
        }
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

/// Whether a Program can run on this rank at all.
fn check_program<B: Backend, T: Transport<B>>(
    program: &Program,
    on: &GroupRank<B, T>,
) -> Result<(), ExecError> {
    let (rank, world_size) = (on.rank(), on.world_size());
    if (rank, world_size) != (program.rank, program.world_size) {
        return Err(ExecError::program(
            program,
            ProgramFault::OtherRank {
                rank: program.rank,
                ranks: program.world_size,
                own_rank: rank,
                own_ranks: world_size,
            },
        ));
    }
    on.backend().check_policy(&program.policy)?;
    // Tensors that do not fit an operation are found where it is prepared.
    program.validate_order().map_err(|fault| ExecError::program(program, fault))
}

/// Has memory in a lane for as many rows of scratch buffers as `room` says.
fn reserve<B: Backend, T: Transport<B>>(
    rank: &GroupRank<B, T>,
    program: &Program,
    lane: usize,
    room: impl Fn(usize, &BufferSpec) -> Option<usize>,
) -> Result<(), ExecError> {
    let scratch = program.buffers.iter().enumerate().filter(|(_, spec)| spec.role == BufferRole::Scratch);
    for (index, spec) in scratch {
        if let Some(rows) = room(index, spec).filter(|rows| *rows > spec.rows()) {
            rank.reserve(lane, spec, rows)?;
        }
    }
    Ok(())
}

/// Memory of what lives inside runs in a lane, and of what runs leave to the next.
fn own_buffers<B: Backend, T: Transport<B>>(
    rank: &GroupRank<B, T>,
    program: &Program,
    lane: usize,
) -> Result<Vec<Option<B::Buffer>>, ExecError> {
    let mut buffers: Vec<Option<B::Buffer>> = vec![None; program.buffers.len()];
    for (number, slot) in program.slots.iter().enumerate() {
        let specs = slot.iter().map(|id| &program.buffers[id.0]);
        let Some(longest) = specs.max_by_key(|spec| spec.bytes()) else { continue };
        let memory = rank.scratch(lane, &BufferSpec { name: format!("slot {number}"), ..longest.clone() })?;
        for id in slot {
            buffers[id.0] = Some(rank.backend().view(&memory, &program.buffers[id.0])?);
        }
    }
    for (spec, buffer) in program.buffers.iter().zip(&mut buffers) {
        match spec.role {
            BufferRole::Scratch if buffer.is_none() => *buffer = Some(rank.scratch(lane, spec)?),
            BufferRole::Persistent => *buffer = Some(rank.backend().allocate(spec)?),
            _ => {}
        }
    }
    Ok(buffers)
}

/// Whether a run finds contents in such a buffer, which the caller has bound.
pub(crate) fn given(role: BufferRole) -> bool {
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
