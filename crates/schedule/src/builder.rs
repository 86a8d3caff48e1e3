//! What Programs are written with, by lowerings and by users: an overlap policy becomes streams, events and barriers here and nowhere else.

use counterpoint_plan::DType;

use crate::{
    BarrierId, BufferId, BufferRole, BufferSpec, EventId, Op, OverlapPolicy, Program, ProgramOp, SignalId,
    StreamId, StreamKind, StreamSpec,
};

/// Writes a [`Program`] under an [`OverlapPolicy`]: who calls it says what may run concurrently, the builder turns that into
/// streams, events and barriers. Streams, buffers, events, barriers and signals are handles of a type of their own.
///
/// ```
/// use counterpoint_plan::DType;
/// use counterpoint_schedule::{BufferRole, Op, OverlapPolicy, ProgramBuilder, StreamKind};
///
/// let mut p = ProgramBuilder::new("convert", 0, 1, OverlapPolicy::default());
/// let compute = p.stream("compute", StreamKind::Compute);
/// let src = p.buffer("x", DType::F32, &[8, 64], BufferRole::Input);
/// let dst = p.buffer("y", DType::Bf16, &[8, 64], BufferRole::Output);
/// p.push(compute, None, "convert", Op::Cast { src, dst });
/// let program = p.finish();
/// program.validate()?;
/// println!("{program}");
/// # Ok::<(), counterpoint_schedule::ProgramError>(())
/// ```
#[derive(Debug)]
pub struct ProgramBuilder {
    program: Program,
}

impl ProgramBuilder {
    /// An empty Program of `rank` of `world_size`.
    pub fn new(name: &str, rank: usize, world_size: usize, policy: OverlapPolicy) -> Self {
        let program = Program {
            name: name.to_owned(),
            rank,
            world_size,
            streams: Vec::new(),
            buffers: Vec::new(),
            slots: Vec::new(),
            num_events: 0,
            num_barriers: 0,
            num_signals: 0,
            policy,
            ops: Vec::new(),
        };
        Self { program }
    }

    /// The policy that the Program is written under.
    pub fn policy(&self) -> &OverlapPolicy {
        &self.program.policy
    }

    /// A stream of its own; where nothing overlaps everything shares the first one.
    pub fn stream(&mut self, name: &str, kind: StreamKind) -> StreamId {
        if !self.program.policy.overlaps() && !self.program.streams.is_empty() {
            return StreamId(0);
        }
        self.program.streams.push(StreamSpec { name: name.to_owned(), kind });
        StreamId(self.program.streams.len() - 1)
    }

    /// A buffer. Inputs and outputs are bound by their names.
    pub fn buffer(&mut self, name: &str, dtype: DType, shape: &[usize], role: BufferRole) -> BufferId {
        self.program.buffers.push(BufferSpec { name: name.to_owned(), dtype, shape: shape.to_vec(), role });
        BufferId(self.program.buffers.len() - 1)
    }

    /// Scratch for `rows` rows as those of `buffer`, whose name it has with `ending`.
    pub fn scratch_like(&mut self, buffer: BufferId, ending: &str, rows: usize) -> BufferId {
        let like = &self.program.buffers[buffer.0];
        let (name, dtype, mut shape) = (format!("{}_{ending}", like.name), like.dtype, like.shape.clone());
        shape[0] = rows;
        self.buffer(&name, dtype, &shape, BufferRole::Scratch)
    }

    /// How many rows `buffer` has.
    pub fn rows(&self, buffer: BufferId) -> usize {
        self.program.buffers[buffer.0].rows()
    }

    /// Has `buffer` reuse the memory of those that were added to `slot` before: the first one opens it.
    pub fn share(&mut self, slot: &mut Option<usize>, buffer: BufferId) {
        let index = *slot.get_or_insert_with(|| {
            self.program.slots.push(Vec::new());
            self.program.slots.len() - 1
        });
        self.program.slots[index].push(buffer);
    }

    /// A barrier where the policy asks for one.
    pub fn barrier(&mut self) -> Option<BarrierId> {
        self.program.policy.has_barriers().then(|| self.start_barrier())
    }

    /// A barrier whatever the policy: for computation that waits for communication inside and must not keep it from starting.
    pub fn start_barrier(&mut self) -> BarrierId {
        self.program.num_barriers += 1;
        BarrierId(self.program.num_barriers - 1)
    }

    /// A counter that a kernel raises part by part, from 0 in the first run on.
    pub fn signal(&mut self) -> SignalId {
        self.program.num_signals += 1;
        SignalId(self.program.num_signals - 1)
    }

    /// Appends an operation. `label` is what timelines and errors call it.
    pub fn push(&mut self, stream: StreamId, stage: Option<usize>, label: &str, op: Op) {
        self.program.ops.push(ProgramOp { stream, stage, label: label.to_owned(), op });
    }

    /// Records an event behind what `stream` has been given so far.
    pub fn mark(&mut self, stream: StreamId, stage: Option<usize>, label: &str) -> Mark {
        let event = EventId(self.program.num_events);
        self.program.num_events += 1;
        self.push(stream, stage, label, Op::Record(event));
        Mark { stream, event }
    }

    /// What `stream` is given from now on waits for `mark`. Nothing to do within one stream.
    pub fn after(&mut self, stream: StreamId, stage: Option<usize>, label: &str, mark: Mark) {
        if stream != mark.stream {
            self.push(stream, stage, label, Op::Wait(mark.event));
        }
    }

    /// What `stream` is given from now on starts once the communication that it should hide has started.
    pub fn after_start(
        &mut self,
        stream: StreamId,
        stage: Option<usize>,
        label: &str,
        barrier: Option<BarrierId>,
        arrivals: u64,
    ) {
        if let Some(barrier) = barrier
            && arrivals > 0
        {
            self.push(stream, stage, label, Op::Await { barrier, arrivals });
        }
    }

    /// The Program. [`Program::validate`] proves that it can neither hang nor race.
    pub fn finish(self) -> Program {
        self.program
    }
}

/// A point of a stream that others can be ordered after.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    stream: StreamId,
    event: EventId,
}
