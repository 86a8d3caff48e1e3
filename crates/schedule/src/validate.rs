//! Whether a Program is well formed and free of data races, without running it.

use thiserror::Error;

use crate::{
    Accumulate, ArrivingKeys, BufferId, BufferRole, ForwardBegin, ForwardEnd, Gemm, GroupCast, GroupReduce,
    Op, Program, SignalId,
};

/// What is wrong with a Program. Operations are named by their index in [`Program::ops`] and their label.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// An index names nothing.
    #[error("op {op} ({label}) names {what} that the Program does not have")]
    Unknown {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// Stream, buffer, event, barrier or signal.
        what: &'static str,
    },
    /// An operation waits for something that nothing queued before it produces.
    #[error("op {op} ({label}) waits for {what} that no earlier op produces; queue the producer first")]
    NoProducer {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// Event, barrier or signal.
        what: &'static str,
    },
    /// An event is recorded twice.
    #[error("op {op} ({label}) records event {event} a second time")]
    RecordedTwice {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// The event.
        event: usize,
    },
    /// An input is written.
    #[error("op {op} ({label}) writes input `{buffer}`")]
    WritesInput {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// Name of the buffer.
        buffer: String,
    },
    /// What a slot says makes no sense.
    #[error("slot {slot} {reason}")]
    Slot {
        /// Index of the slot.
        slot: usize,
        /// Such as `names a buffer that is no scratch`.
        reason: &'static str,
    },
    /// An operation reads a buffer after another one has had its turn in the slot.
    #[error(
        "op {op} ({label}) reads buffer `{buffer}`, whose slot holds `{other}` by then; read it earlier or give it a slot of its own"
    )]
    Overwritten {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// Name of the buffer.
        buffer: String,
        /// Name of the buffer that the slot holds.
        other: String,
    },
    /// A product whose rows travel while it is computed may run beside another collective.
    #[error(
        "ops {first} ({first_label}) and {second} ({second_label}) may wait for other ranks at the same time, and one of them \
         holds all workers meanwhile; order them by an event"
    )]
    UnorderedFused {
        /// Index of the operation queued first.
        first: usize,
        /// Its label.
        first_label: String,
        /// Index of the other.
        second: usize,
        /// Its label.
        second_label: String,
    },
    /// A computation waits inside for rows whose group-cast it may keep from starting.
    #[error(
        "op {op} ({label}) takes rows as they arrive and may hold all workers before their group-cast has started; await its \
         start"
    )]
    StartNotAwaited {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
    },
    /// Two operations use one buffer (or one slot), at least one writes it, and nothing orders them.
    #[error(
        "ops {first} ({first_label}) and {second} ({second_label}) race on buffer `{buffer}`; order them by an event"
    )]
    Race {
        /// Index of the operation queued first.
        first: usize,
        /// Its label.
        first_label: String,
        /// Index of the other.
        second: usize,
        /// Its label.
        second_label: String,
        /// Name of the buffer.
        buffer: String,
    },
}

impl Op {
    /// What arrives while the operation runs.
    pub fn arriving(&self) -> Option<&ArrivingKeys> {
        match self {
            Op::AttentionForward(op) => op.arriving.as_ref(),
            Op::AttentionBackward(op) => op.arriving.as_ref(),
            _ => None,
        }
    }

    /// Buffers that the operation reads, those apart that it reads once their rows have been delivered
    /// ([`Op::arriving`]). One that it reads and writes is in both lists.
    pub fn reads(&self) -> Vec<BufferId> {
        match self {
            Op::AttentionForward(op) => {
                let mut out = vec![op.q, op.k, op.v];
                if let ForwardBegin::Continue(state) = op.begin {
                    out.extend(state.buffers());
                }
                if let ForwardEnd::Result { sink, .. } = op.end {
                    out.extend(sink);
                }
                out
            }
            Op::AttentionFinish(op) => {
                // Rows that it does not name stay as they are, so what was there counts.
                let mut out = vec![op.merged_out, op.merged_lse, op.out, op.lse];
                out.extend(op.sink);
                out
            }
            Op::AttentionDelta(op) => {
                let mut out = vec![op.out, op.dout, op.lse];
                if let Some((sink, _)) = op.sink {
                    out.push(sink);
                }
                out
            }
            Op::AttentionBackward(op) => {
                let mut out = vec![op.q, op.k, op.v, op.dout, op.lse, op.delta];
                if op.accumulate_dq == Accumulate::Continue {
                    out.push(op.dq);
                }
                out
            }
            Op::Gemm(op) => op.reads(),
            Op::WaveGemm(op) => op.groups.iter().flat_map(Gemm::reads).collect(),
            Op::UserKernel(op) => op.parts.iter().flat_map(|part| part.reads.iter().copied()).collect(),
            Op::RmsNorm(op) => {
                let mut out: Vec<_> = op.src.iter().map(|block| block.buffer).collect();
                out.extend(op.residual.map(|(residual, _)| residual));
                out.push(op.weight);
                out
            }
            Op::ColumnSum(op) => {
                let mut out: Vec<_> = op.src.iter().map(|block| block.buffer).collect();
                if op.accumulate == Accumulate::Continue {
                    out.push(op.dst);
                }
                out
            }
            Op::GroupCast(op) => op.tensors.iter().map(|&(input, _)| input).collect(),
            Op::GroupReduce(op) => op.reads(),
            Op::GemmReduce(op) => {
                let mut out = op.gemm.reads();
                out.extend(op.reduce.reads());
                out.extend(op.spread.iter().flat_map(|cast| &cast.tensors).map(|&(input, _)| input));
                out
            }
            Op::CastGemm(op) => {
                let mut out = op.gemm.reads();
                out.extend(op.cast.tensors.iter().map(|&(input, _)| input));
                out
            }
            Op::Cast { src, .. } | Op::CopyRows { src, .. } => vec![*src],
            Op::Concat { srcs, .. } => srcs.clone(),
            Op::PlaceRows { src, dst, .. } => vec![*src, *dst],
            Op::Record(_) | Op::Wait(_) | Op::Await { .. } | Op::Signal { .. } | Op::WaitSignal { .. } => {
                Vec::new()
            }
        }
    }

    /// Buffers that the operation writes.
    pub fn writes(&self) -> Vec<BufferId> {
        match self {
            Op::AttentionForward(op) => match op.end {
                ForwardEnd::State(state) => state.buffers().to_vec(),
                ForwardEnd::Result { out, lse, .. } => vec![out, lse],
            },
            Op::AttentionFinish(op) => vec![op.out, op.lse],
            Op::AttentionDelta(op) => {
                let mut out = vec![op.delta];
                out.extend(op.sink.map(|(_, dsink)| dsink));
                out
            }
            Op::AttentionBackward(op) => {
                let mut out = vec![op.dq, op.dk, op.dv];
                out.extend(op.rounded_dq);
                out
            }
            Op::Gemm(op) => vec![op.out],
            Op::WaveGemm(op) => op.groups.iter().map(|group| group.out).collect(),
            Op::UserKernel(op) => op.parts.iter().flat_map(|part| part.writes.iter().copied()).collect(),
            Op::RmsNorm(op) => {
                let mut out = vec![op.out];
                out.extend(op.residual.map(|(_, sum)| sum));
                out
            }
            Op::ColumnSum(op) => vec![op.dst],
            Op::GroupCast(op) => op.tensors.iter().map(|&(_, output)| output).collect(),
            Op::GroupReduce(op) => op.tensors.iter().map(|&(_, output)| output).collect(),
            Op::GemmReduce(op) => {
                let casts = op.spread.iter().flat_map(|cast| &cast.tensors);
                let outputs = op.reduce.tensors.iter().chain(casts).map(|&(_, output)| output);
                [op.gemm.out].into_iter().chain(outputs).collect()
            }
            Op::CastGemm(op) => {
                let mut out = vec![op.gemm.out];
                out.extend(op.cast.tensors.iter().map(|&(_, output)| output));
                out
            }
            Op::Cast { dst, .. }
            | Op::Concat { dst, .. }
            | Op::CopyRows { dst, .. }
            | Op::PlaceRows { dst, .. } => vec![*dst],
            Op::Record(_) | Op::Wait(_) | Op::Await { .. } | Op::Signal { .. } | Op::WaitSignal { .. } => {
                Vec::new()
            }
        }
    }
}

impl Op {
    /// What each part of the operation reads and then writes, parts in their order.
    fn uses(&self) -> Vec<(usize, Vec<BufferId>, bool)> {
        match self {
            Op::WaveGemm(waves) => {
                let groups = waves.groups.iter().enumerate();
                groups
                    .flat_map(|(part, group)| [(part, group.reads(), false), (part, vec![group.out], true)])
                    .collect()
            }
            Op::UserKernel(user) => {
                let parts = user.parts.iter().enumerate();
                parts
                    .flat_map(|(at, part)| [(at, part.reads.clone(), false), (at, part.writes.clone(), true)])
                    .collect()
            }
            _ => vec![(usize::MAX, self.reads(), false), (usize::MAX, self.writes(), true)],
        }
    }
}

impl Gemm {
    fn reads(&self) -> Vec<BufferId> {
        let mut out: Vec<_> = self.a.iter().chain(&self.b).map(|block| block.buffer).collect();
        out.extend(self.bias);
        // Rows that it does not name stay as they are, so what was there counts in any case.
        out.push(self.out);
        out
    }
}

impl GroupReduce {
    fn reads(&self) -> Vec<BufferId> {
        let mut out: Vec<_> = self.tensors.iter().map(|&(input, _)| input).collect();
        if self.accumulate == Accumulate::Continue {
            out.extend(self.tensors.iter().map(|&(_, output)| output));
        }
        out
    }
}

impl Program {
    /// Checks that every index is in range, that producers are queued before those who wait for them, that inputs are only
    /// read, that no two unordered operations touch one buffer with a write among them, and that buffers of a slot, which for
    /// that count as one, are read before the next one has its turn. And that a product whose rows travel while it is computed
    /// is in order with every other collective: it may hold all of a device's workers while it waits for other ranks. A
    /// computation that takes rows as they arrive may as well, so the start of what brings them must have been awaited.
    ///
    /// Order comes from streams, events and signals. A kernel barrier orders starts only, so it makes no data safe.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), ProgramError> {
        let clocks = self.clocks()?;
        self.check_starts(&clocks)?;
        let memory = self.memory()?;
        self.check_fused(&clocks)?;
        // By piece of memory: who uses it, whether to write, and as which buffer.
        let mut users: Vec<Vec<(Step, bool, usize)>> =
            vec![Vec::new(); self.buffers.len() + self.slots.len()];
        for (index, op) in self.ops.iter().enumerate() {
            for (part, buffers, write) in op.op.uses() {
                for BufferId(buffer) in buffers {
                    let Some(spec) = self.buffers.get(buffer) else {
                        return Err(self.unknown(index, "a buffer"));
                    };
                    if write && spec.role == BufferRole::Input {
                        let (op, label, buffer) = (index, op.label.clone(), spec.name.clone());
                        return Err(ProgramError::WritesInput { op, label, buffer });
                    }
                    users[memory[buffer]].push((Step { op: index, part }, write, buffer));
                }
            }
            for buffer in op.op.arriving().into_iter().flat_map(|keys| [keys.k.0, keys.v.0]) {
                if buffer >= self.buffers.len() {
                    return Err(self.unknown(index, "a buffer"));
                }
                users[memory[buffer]].push((Step::whole(index), false, buffer));
            }
        }
        // Such a buffer is read as it is delivered, unless the operation reads it otherwise too.
        let arriving = |op: usize, buffer: usize| {
            let op = &self.ops[op].op;
            let arrives = op.arriving().is_some_and(|keys| [keys.k.0, keys.v.0].contains(&buffer));
            arrives && !op.reads().contains(&BufferId(buffer))
        };
        for users in &users {
            for (i, &(step, first_writes, first_buffer)) in users.iter().enumerate() {
                let first = step.op;
                for &(Step { op: second, .. }, second_writes, buffer) in &users[i + 1..] {
                    let together = first == second && first_buffer == buffer;
                    let clocks = &clocks[second];
                    let clock = if arriving(second, buffer) { &clocks.delivered } else { &clocks.start };
                    let ordered = together || clock.follows(self.ops[first].stream.0, step);
                    if (first_writes || second_writes) && !ordered {
                        return Err(ProgramError::Race {
                            first,
                            first_label: self.ops[first].label.clone(),
                            second,
                            second_label: self.ops[second].label.clone(),
                            buffer: self.buffers[buffer].name.clone(),
                        });
                    }
                }
            }
            self.check_turns(users)?;
        }
        Ok(())
    }

    /// That nobody keeps what it waits for from starting: where a group-cast need not be over, its start has been awaited.
    fn check_starts(&self, clocks: &[Clocks]) -> Result<(), ProgramError> {
        // Of the barriers: how many have arrived, and how many each stream has awaited.
        let mut arrived = vec![0u64; self.num_barriers];
        let mut awaited = vec![vec![0u64; self.num_barriers]; self.streams.len()];
        // By signal: the group-cast that raises it, and its arrival at a barrier.
        let mut casts: Vec<Option<(usize, Option<Arrival>)>> = vec![None; self.num_signals];
        for (index, op) in self.ops.iter().enumerate() {
            let arrives = match &op.op {
                Op::GroupCast(cast) => cast.arrive,
                Op::GroupReduce(reduce) => reduce.arrive,
                Op::GemmReduce(both) => both.reduce.arrive,
                Op::CastGemm(both) => both.cast.arrive,
                _ => None,
            };
            if let Some(barrier) = arrives {
                arrived[barrier.0] += 1;
            }
            match &op.op {
                Op::GroupCast(GroupCast { delivery: Some(delivery), .. }) => {
                    let start = arrives.map(|barrier| (barrier.0, arrived[barrier.0]));
                    casts[delivery.signal.0] = Some((index, start));
                }
                Op::Await { barrier, arrivals } => {
                    let awaited = &mut awaited[op.stream.0][barrier.0];
                    *awaited = (*awaited).max(*arrivals);
                }
                _ => {}
            }
            let Some(keys) = op.op.arriving() else { continue };
            let Some((cast, start)) = casts[keys.delivery.signal.0] else { continue };
            let over = clocks[index].start.follows(self.ops[cast].stream.0, Step::whole(cast));
            let started = start.is_some_and(|(barrier, count)| awaited[op.stream.0][barrier] >= count);
            if !over && !started {
                return Err(ProgramError::StartNotAwaited { op: index, label: op.label.clone() });
            }
        }
        Ok(())
    }

    fn check_fused(&self, clocks: &[Clocks]) -> Result<(), ProgramError> {
        let collectives = self.ops.iter().enumerate().filter_map(|(index, op)| match op.op {
            Op::GemmReduce(_) | Op::CastGemm(_) => Some((index, true)),
            Op::GroupCast(_) | Op::GroupReduce(_) => Some((index, false)),
            _ => None,
        });
        let collectives: Vec<(usize, bool)> = collectives.collect();
        for (place, &(first, first_fused)) in collectives.iter().enumerate() {
            for &(second, second_fused) in &collectives[place + 1..] {
                let ordered = clocks[second].start.follows(self.ops[first].stream.0, Step::whole(first));
                if (first_fused || second_fused) && !ordered {
                    return Err(ProgramError::UnorderedFused {
                        first,
                        first_label: self.ops[first].label.clone(),
                        second,
                        second_label: self.ops[second].label.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    /// For every buffer the piece of memory that it lies in: its own, or from `buffers.len()` on its slot's.
    fn memory(&self) -> Result<Vec<usize>, ProgramError> {
        let mut memory: Vec<usize> = (0..self.buffers.len()).collect();
        for (slot, buffers) in self.slots.iter().enumerate() {
            for &BufferId(buffer) in buffers {
                let reason = match self.buffers.get(buffer) {
                    None => "names a buffer that the Program does not have",
                    Some(spec) if spec.role != BufferRole::Scratch => "names a buffer that is no scratch",
                    Some(_) if memory[buffer] != buffer => "names a buffer that has a slot already",
                    Some(_) => {
                        memory[buffer] = self.buffers.len() + slot;
                        continue;
                    }
                };
                return Err(ProgramError::Slot { slot, reason });
            }
        }
        Ok(memory)
    }

    /// Whether each reader of a piece of memory finds there what was last written as its own buffer. `users` are ordered where
    /// one of two writes, and an operation's reads come before its writes.
    fn check_turns(&self, users: &[(Step, bool, usize)]) -> Result<(), ProgramError> {
        let mut held: Option<usize> = None;
        for &(Step { op, .. }, write, buffer) in users {
            match held {
                Some(other) if other != buffer && !write => {
                    return Err(ProgramError::Overwritten {
                        op,
                        label: self.ops[op].label.clone(),
                        buffer: self.buffers[buffer].name.clone(),
                        other: self.buffers[other].name.clone(),
                    });
                }
                _ => held = Some(buffer),
            }
        }
        Ok(())
    }

    fn unknown(&self, op: usize, what: &'static str) -> ProgramError {
        ProgramError::Unknown { op, label: self.ops[op].label.clone(), what }
    }

    /// For every operation, what is certainly finished before it starts and before it reads what arrives meanwhile.
    fn clocks(&self) -> Result<Vec<Clocks>, ProgramError> {
        let no_producer =
            |op: usize, what| ProgramError::NoProducer { op, label: self.ops[op].label.clone(), what };
        let mut streams = vec![Clock::new(self.streams.len()); self.streams.len()];
        let mut events: Vec<Option<Clock>> = vec![None; self.num_events];
        let mut arrivals = vec![0u64; self.num_barriers];
        let mut signals: Vec<Vec<(u64, Clock)>> = vec![Vec::new(); self.num_signals];
        let mut out = Vec::with_capacity(self.ops.len());
        for (index, op) in self.ops.iter().enumerate() {
            let stream = op.stream.0;
            let Some(mut clock) = streams.get(stream).cloned() else {
                return Err(self.unknown(index, "a stream"));
            };
            match &op.op {
                Op::Record(event) => match events.get_mut(event.0) {
                    None => return Err(self.unknown(index, "an event")),
                    Some(Some(_)) => {
                        let (op, label, event) = (index, op.label.clone(), event.0);
                        return Err(ProgramError::RecordedTwice { op, label, event });
                    }
                    Some(slot) => *slot = Some(clock.clone()),
                },
                Op::Wait(event) => match events.get(event.0) {
                    None => return Err(self.unknown(index, "an event")),
                    Some(None) => return Err(no_producer(index, "an event")),
                    Some(Some(other)) => clock.join(other),
                },
                Op::Await { barrier, arrivals: wanted } => match arrivals.get(barrier.0) {
                    None => return Err(self.unknown(index, "a barrier")),
                    Some(have) if have < wanted => return Err(no_producer(index, "a barrier")),
                    Some(_) => {}
                },
                Op::Signal { signal: SignalId(signal), value } => match signals.get_mut(*signal) {
                    None => return Err(self.unknown(index, "a signal")),
                    Some(raised) => raised.push((*value, clock.clone())),
                },
                Op::WaitSignal { signal: SignalId(signal), value } => {
                    let Some(raised) = signals.get(*signal) else {
                        return Err(self.unknown(index, "a signal"));
                    };
                    // Whichever sufficient signal comes first releases the wait: only what precedes all of them is certain.
                    let enough =
                        raised.iter().filter(|(raised, _)| raised >= value).map(|(_, clock)| clock.clone());
                    match enough.reduce(Clock::meet) {
                        None => return Err(no_producer(index, "a signal")),
                        Some(other) => clock.join(&other),
                    }
                }
                Op::GroupCast(cast) => {
                    self.arrive(index, cast.arrive, &mut arrivals)?;
                    if let Some(delivery) = cast.delivery {
                        let Some(raised) = signals.get_mut(delivery.signal.0) else {
                            return Err(self.unknown(index, "a signal"));
                        };
                        let mut finished = clock.clone();
                        finished.finished[stream] = Some(Step::whole(index));
                        raised.push((delivery.parts as u64, finished));
                    }
                }
                Op::GroupReduce(reduce) => self.arrive(index, reduce.arrive, &mut arrivals)?,
                Op::GemmReduce(both) => {
                    self.arrive(index, both.reduce.arrive, &mut arrivals)?;
                    let spread = both.spread.as_ref().and_then(|cast| cast.arrive);
                    self.arrive(index, spread, &mut arrivals)?;
                }
                Op::CastGemm(both) => self.arrive(index, both.cast.arrive, &mut arrivals)?,
                _ => {}
            }
            // What this rank sends in the same cast may be under way for longer, so later operations know nothing more.
            let mut delivered = clock.clone();
            if let Some(keys) = op.op.arriving() {
                let Some(raised) = signals.get(keys.delivery.signal.0) else {
                    return Err(self.unknown(index, "a signal"));
                };
                let [(parts, cast)] = &raised[..] else { return Err(no_producer(index, "a delivery")) };
                if *parts != keys.delivery.parts as u64 {
                    return Err(no_producer(index, "a delivery in as many parts"));
                }
                delivered.join(cast);
            }
            if let Some((signal, parts)) = op.op.raises() {
                let Some(raised) = signals.get_mut(signal.0) else {
                    return Err(self.unknown(index, "a signal"));
                };
                for part in 0..parts {
                    let mut so_far = clock.clone();
                    so_far.finished[stream] = Some(Step { op: index, part });
                    raised.push((part as u64 + 1, so_far));
                }
            }
            out.push(Clocks { start: clock.clone(), delivered });
            clock.finished[stream] = Some(Step::whole(index));
            streams[stream] = clock;
        }
        Ok(out)
    }

    fn arrive(
        &self,
        op: usize,
        barrier: Option<crate::BarrierId>,
        arrivals: &mut [u64],
    ) -> Result<(), ProgramError> {
        if let Some(barrier) = barrier {
            *arrivals.get_mut(barrier.0).ok_or_else(|| self.unknown(op, "a barrier"))? += 1;
        }
        Ok(())
    }
}

/// A barrier, and how many have arrived at it by then.
type Arrival = (usize, u64);

/// What is certainly finished at points of an operation.
#[derive(Clone, Debug)]
struct Clocks {
    /// When it starts.
    start: Clock,
    /// When what arrives meanwhile is there.
    delivered: Clock,
}

/// An operation, or a part of one that others may see finished before the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Step {
    op: usize,
    part: usize,
}

impl Step {
    /// All parts.
    fn whole(op: usize) -> Self {
        Self { op, part: usize::MAX }
    }
}

/// The last finished step of each stream: a vector clock.
#[derive(Clone, Debug)]
struct Clock {
    finished: Vec<Option<Step>>,
}

impl Clock {
    fn new(streams: usize) -> Self {
        Self { finished: vec![None; streams] }
    }

    fn join(&mut self, other: &Clock) {
        for (mine, theirs) in self.finished.iter_mut().zip(&other.finished) {
            *mine = (*mine).max(*theirs);
        }
    }

    fn meet(mut self, other: Clock) -> Clock {
        for (mine, theirs) in self.finished.iter_mut().zip(other.finished) {
            *mine = (*mine).min(theirs);
        }
        self
    }

    /// Whether `step` of `stream` is certainly finished.
    fn follows(&self, stream: usize, step: Step) -> bool {
        self.finished[stream].is_some_and(|last| last >= step)
    }
}
