//! The events of a simulated run, in the order of their times.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use counterpoint_cost::CostModel;
use counterpoint_plan::{GroupPart, Topology};

use super::rank::{Computing, Head, Rank};
use super::{SimulateError, collective_part, parts_before_collective, transfer};
use crate::{GroupCast, Op, OpCost, Program, Span, SpanKind};

/// All spans of a run, in no order.
pub(super) fn run(
    programs: &[Program],
    topology: &Topology,
    cost: &(impl OpCost + ?Sized),
) -> Result<Vec<Span>, SimulateError> {
    let mut clockwork = Clockwork::new(programs, topology, (cost, cost.rates()));
    clockwork.run();
    let stuck = clockwork.ranks.iter().find_map(|rank| {
        let op = rank.first_unfinished()?;
        let Program { rank, ops, .. } = rank.program;
        Some(SimulateError::Stuck { rank: *rank, op, label: ops[op].label.clone() })
    });
    stuck.map_or(Ok(clockwork.spans), Err)
}

/// Something that happens at a time: those of one time in the order in which they were entered.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    at: f64,
    number: u64,
    rank: usize,
    stream: usize,
}

impl Eq for Entry {}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A collective that waits for all of its ranks.
struct Arrivals {
    /// Of every Program: ranks that it exchanges rows with and that have started.
    started: Vec<u32>,
    /// Of every Program: how many it waits for, once it has started itself.
    wanted: Vec<Option<u32>>,
}

struct Clockwork<'a, C: OpCost + ?Sized> {
    topology: &'a Topology,
    /// Seconds of computations.
    seconds: &'a C,
    cost: &'a CostModel,
    ranks: Vec<Rank<'a>>,
    /// Index of every rank's Program, where it is given.
    index: Vec<Option<usize>>,
    arrivals: Vec<Arrivals>,
    agenda: BinaryHeap<Reverse<Entry>>,
    entries: u64,
    spans: Vec<Span>,
    /// The last question in which each rank was seen, to count every peer once.
    seen: Vec<usize>,
    questions: usize,
}

impl<'a, C: OpCost + ?Sized> Clockwork<'a, C> {
    fn new(programs: &'a [Program], topology: &'a Topology, (seconds, cost): (&'a C, &'a CostModel)) -> Self {
        let ranks: Vec<Rank<'_>> = programs.iter().map(Rank::new).collect();
        let world = programs.iter().map(|p| p.world_size.max(p.rank + 1)).max().unwrap_or(0);
        let mut index = vec![None; world];
        for (at, program) in programs.iter().enumerate() {
            index[program.rank] = Some(at);
        }
        let collectives = ranks.first().map_or(0, |rank| rank.collectives);
        let arrivals = || Arrivals { started: vec![0; programs.len()], wanted: vec![None; programs.len()] };
        Self {
            topology,
            seconds,
            cost,
            index,
            arrivals: (0..collectives).map(|_| arrivals()).collect(),
            ranks,
            agenda: BinaryHeap::new(),
            entries: 0,
            spans: Vec::new(),
            seen: vec![0; world],
            questions: 0,
        }
    }

    fn run(&mut self) {
        for rank in 0..self.ranks.len() {
            for stream in self.ranks[rank].streams_by_head() {
                self.enter(0.0, rank, stream);
            }
        }
        while let Some(Reverse(entry)) = self.agenda.pop() {
            let Entry { at, number, rank, stream } = entry;
            match self.ranks[rank].heads[stream] {
                Head::Waiting => self.advance(rank, stream, at),
                Head::Running(expected) if expected == number => self.finish(rank, stream, at),
                // The end of a computation that has been slowed down or sped up since.
                Head::Running(_) => {}
            }
        }
    }

    /// Has a stream looked at, at a time.
    fn enter(&mut self, at: f64, rank: usize, stream: usize) -> u64 {
        self.entries += 1;
        self.agenda.push(Reverse(Entry { at, number: self.entries, rank, stream }));
        self.entries
    }

    /// Goes through the operations of a stream until one takes time or waits.
    fn advance(&mut self, rank: usize, stream: usize, now: f64) {
        while let Some((op, collective)) = self.ranks[rank].head(stream) {
            let sharing = self.cost.sharing;
            let state = &mut self.ranks[rank];
            if state.heads[stream] != Head::Waiting || !state.may_issue(op, sharing) {
                return;
            }
            let program = state.program;
            match &program.ops[op].op {
                wait @ (Op::Wait(_) | Op::Await { .. } | Op::WaitSignal { .. }) => {
                    if !state.is_released(wait, 0) {
                        return;
                    }
                    self.span(rank, stream, op, SpanKind::Wait, self.ranks[rank].reached[stream], now);
                }
                Op::Record(event) => {
                    state.events[event.0] = true;
                    self.wake_waiting(rank, now);
                }
                Op::Signal { signal, value } => {
                    let signal = &mut state.signals[signal.0];
                    *signal = (*signal).max(*value);
                    self.wake_waiting(rank, now);
                }
                // What it can do before its rows are there is done.
                computation if !state.is_released(computation, state.parts[stream]) => return,
                _ => {
                    match collective {
                        None => {
                            let pauses = state.program.ops[op].op.arrivals().is_some();
                            let reached = state.reached[stream];
                            if pauses {
                                self.span(rank, stream, op, SpanKind::Wait, reached, now);
                            }
                            let state = &mut self.ranks[rank];
                            if pauses || state.parts[stream] == 0 {
                                state.reached[stream] = now;
                            }
                            self.start_computation(rank, stream, op, now);
                        }
                        Some(number) if state.has_workers(op, sharing) => {
                            self.start_collective(rank, stream, op, number, now);
                        }
                        Some(_) => return,
                    }
                    self.issue(rank, op, now);
                    return;
                }
            }
            self.issue(rank, op, now);
            self.pass(rank, stream, now);
        }
    }

    /// The next operation is at the head.
    fn pass(&mut self, rank: usize, stream: usize, now: f64) {
        let state = &mut self.ranks[rank];
        state.next[stream] += 1;
        (state.parts[stream], state.since[stream]) = (0, 0);
        state.reached[stream] = now;
        state.heads[stream] = Head::Waiting;
    }

    /// An operation has started; with one hardware queue the one queued after it is looked at.
    fn issue(&mut self, rank: usize, op: usize, now: f64) {
        let state = &mut self.ranks[rank];
        let Some(next) = state.issued(op) else { return };
        let stream = state.program.ops[next].stream.0;
        let is_head = state.head(stream).is_some_and(|(op, _)| op == next);
        if is_head && state.heads[stream] == Head::Waiting {
            self.enter(now, rank, stream);
        }
    }

    /// Has streams looked at that wait for something which may have happened. They go on a moment later: whatever follows in
    /// the stream that made it happen is first.
    fn wake_waiting(&mut self, rank: usize, now: f64) {
        let state = &self.ranks[rank];
        let woken: Vec<usize> = state.streams_by_head();
        let waits = |&stream: &usize| {
            state.head(stream).is_some_and(|(op, _)| {
                let (op, part) = (&state.program.ops[op].op, state.parts[stream]);
                let waits = matches!(op, Op::Wait(_) | Op::Await { .. } | Op::WaitSignal { .. });
                let pauses = part > 0 || op.arrivals().is_some();
                (waits || (pauses && state.heads[stream] == Head::Waiting)) && state.is_released(op, part)
            })
        };
        let woken: Vec<usize> = woken.into_iter().filter(waits).collect();
        for stream in woken {
            self.enter(now, rank, stream);
        }
    }

    fn start_computation(&mut self, rank: usize, stream: usize, op: usize, now: f64) {
        let (cost, state) = (self.cost, &mut self.ranks[rank]);
        let (parts, computed) = (state.since[stream]..state.parts[stream] + 1, state.computed_seconds);
        let op = &state.program.ops[op];
        let Some(left) = self.seconds.part_seconds(state.program, op, parts, computed) else { return };
        state.computed_seconds += left;
        let speed = state.speed(cost.sharing);
        state.computing.push(Computing { stream, left, since: now, speed });
        let number = self.enter(now + left / speed, rank, stream);
        self.ranks[rank].heads[stream] = Head::Running(number);
    }

    /// Computations of a rank go on at the speed that they have now.
    fn change_speed(&mut self, rank: usize, now: f64) {
        let speed = self.ranks[rank].speed(self.cost.sharing);
        for at in 0..self.ranks[rank].computing.len() {
            let computing = &mut self.ranks[rank].computing[at];
            if computing.speed == speed {
                continue;
            }
            computing.left -= (now - computing.since) * computing.speed;
            (computing.since, computing.speed) = (now, speed);
            let (stream, end) = (computing.stream, now + computing.left.max(0.0) / speed);
            let number = self.enter(end, rank, stream);
            self.ranks[rank].heads[stream] = Head::Running(number);
        }
    }

    fn start_collective(&mut self, rank: usize, stream: usize, op: usize, number: usize, now: f64) {
        // It may have waited for workers.
        self.span(rank, stream, op, SpanKind::Wait, self.ranks[rank].reached[stream], now);
        let state = &mut self.ranks[rank];
        let program = state.program;
        state.reached[stream] = now;
        // Ends by an entry of its own, once it has begun.
        state.heads[stream] = Head::Running(0);
        state.communicating += usize::from(state.takes_workers(op));
        for barrier in program.ops[op].op.arrives() {
            self.ranks[rank].arrivals[barrier.0] += 1;
            self.wake_waiting(rank, now);
        }
        self.change_speed(rank, now);
        let Some(part) = collective_part(&program.ops[op].op) else { return };
        let peers = self.peers(rank, part);
        let arrivals = &mut self.arrivals[number];
        arrivals.wanted[rank] = Some(peers.len() as u32);
        let mut complete = Vec::new();
        if arrivals.started[rank] == peers.len() as u32 {
            complete.push(rank);
        }
        for peer in peers {
            arrivals.started[peer] += 1;
            if arrivals.wanted[peer] == Some(arrivals.started[peer]) {
                complete.push(peer);
            }
        }
        for rank in complete {
            self.begin_collective(rank, number, now);
        }
    }

    /// The Programs of other ranks that a rank exchanges rows with.
    fn peers(&mut self, rank: usize, part: &GroupPart) -> Vec<usize> {
        self.questions += 1;
        let (question, seen, index) = (self.questions, &mut self.seen, &self.index);
        seen[self.ranks[rank].program.rank] = question;
        let owned = part.owned.iter().flat_map(|split| split.ranks.iter().copied());
        let all = owned.chain(part.remote.iter().map(|split| split.rank));
        let once = all.filter(|&peer| std::mem::replace(&mut seen[peer as usize], question) != question);
        once.filter_map(|peer| index[peer as usize]).collect()
    }

    /// Everyone is there: rows move.
    fn begin_collective(&mut self, rank: usize, number: usize, now: f64) {
        let state = &self.ranks[rank];
        let head = |stream: &usize| state.head(*stream).is_some_and(|(_, at)| at == Some(number));
        let Some(stream) = (0..state.queues.len()).find(head) else { return };
        let Some((op, _)) = state.head(stream) else { return };
        let moved = transfer(state.program, &state.program.ops[op], self.topology, self.cost);
        let mut ends = [now; 2];
        for (port, end) in ends.iter_mut().enumerate() {
            if moved.moving[port] > 0.0 {
                let state = &mut self.ranks[rank];
                let free = if self.cost.sharing.is_some() { state.port_free[port] } else { 0.0 };
                *end = free.max(now + moved.alpha[port]) + moved.moving[port];
                state.port_free[port] = *end;
            }
        }
        let mut end = ends[0].max(ends[1]);
        let program = self.ranks[rank].program;
        if program.ops[op].op.is_fused_gemm() {
            let multiplying = self.seconds.compute_seconds(program, &program.ops[op], 0.0);
            let multiplied = now + moved.alpha[0] + multiplying;
            end = end.max(multiplied);
        }
        let number = self.enter(end, rank, stream);
        self.ranks[rank].heads[stream] = Head::Running(number);
    }

    /// The operation at the head of a stream has ended.
    fn finish(&mut self, rank: usize, stream: usize, now: f64) {
        let state = &mut self.ranks[rank];
        let Some((op, collective)) = state.head(stream) else { return };
        let start = state.reached[stream];
        let kind = match collective {
            Some(_) => {
                state.communicating -= usize::from(state.takes_workers(op));
                match state.program.ops[op].op.is_fused_gemm() {
                    true => SpanKind::Compute,
                    false => SpanKind::Communication,
                }
            }
            None => {
                state.computing.retain(|computing| computing.stream != stream);
                if self.go_on(rank, stream, op, now) {
                    return;
                }
                SpanKind::Compute
            }
        };
        let state = &mut self.ranks[rank];
        if let Op::GroupCast(GroupCast { delivery: Some(delivery), .. }) = &state.program.ops[op].op {
            state.signals[delivery.signal.0] = delivery.parts as u64;
            self.wake_waiting(rank, now);
        }
        self.span(rank, stream, op, kind, start, now);
        self.pass(rank, stream, now);
        self.change_speed(rank, now);
        // What has been waiting for workers gets them before the next computation, what comes now after it.
        for stream in self.pending(rank, |reached| reached < now) {
            self.advance(rank, stream, now);
        }
        self.advance(rank, stream, now);
        for stream in self.pending(rank, |reached| reached == now) {
            self.enter(now, rank, stream);
        }
    }

    /// A part of an operation has ended. Whether there is another one, which has started then or waits for its rows.
    fn go_on(&mut self, rank: usize, stream: usize, op: usize, now: f64) -> bool {
        let state = &mut self.ranks[rank];
        let before_collective = parts_before_collective(&state.program.ops[op].op);
        if before_collective > 0 {
            state.parts[stream] += 1;
            state.heads[stream] = Head::Waiting;
            if state.parts[stream] == before_collective {
                self.span(rank, stream, op, SpanKind::Compute, self.ranks[rank].reached[stream], now);
                self.ranks[rank].reached[stream] = now;
            }
            self.change_speed(rank, now);
            for waiting in self.pending(rank, |reached| reached < now) {
                self.advance(rank, waiting, now);
            }
            self.advance(rank, stream, now);
            return true;
        }
        if state.program.ops[op].op.arriving().is_some() {
            state.parts[stream] += 1;
            state.heads[stream] = Head::Waiting;
            let more = state.parts[stream] < 2;
            if more {
                self.change_speed(rank, now);
                self.advance(rank, stream, now);
            } else {
                state.parts[stream] = 0;
            }
            return more;
        }
        let computation = &state.program.ops[op].op;
        let Some(parts) = computation.steps() else { return false };
        state.parts[stream] += 1;
        let done = state.parts[stream];
        if let Some((signal, _)) = computation.raises() {
            let signal = &mut state.signals[signal.0];
            *signal = (*signal).max(done as u64);
            self.wake_waiting(rank, now);
        }
        if done == parts {
            self.ranks[rank].parts[stream] = 0;
            return false;
        }
        let state = &mut self.ranks[rank];
        if !state.is_released(computation, done) {
            // Its workers wait, and the waves of the parts behind are new ones.
            let began = state.reached[stream];
            state.heads[stream] = Head::Waiting;
            (state.since[stream], state.reached[stream]) = (done, now);
            self.span(rank, stream, op, SpanKind::Compute, began, now);
            self.change_speed(rank, now);
            for waiting in self.pending(rank, |reached| reached < now) {
                self.advance(rank, waiting, now);
            }
            return true;
        }
        // A grid that nothing is kept free of lets others in between two parts.
        for waiting in self.pending(rank, |reached| reached < now) {
            self.advance(rank, waiting, now);
        }
        self.start_computation(rank, stream, op, now);
        true
    }

    /// Streams at whose head is a collective that has not started, of those reached at such a time.
    fn pending(&self, rank: usize, reached: impl Fn(f64) -> bool) -> Vec<usize> {
        let state = &self.ranks[rank];
        let mut streams = state.streams_by_head();
        streams.retain(|&stream| {
            let is_collective = state.head(stream).is_some_and(|(_, collective)| collective.is_some());
            is_collective && state.heads[stream] == Head::Waiting && reached(state.reached[stream])
        });
        streams
    }

    fn span(&mut self, rank: usize, stream: usize, op: usize, kind: SpanKind, start: f64, end: f64) {
        if end > start {
            let op = &self.ranks[rank].program.ops[op];
            let (label, stage) = (op.label.clone(), op.stage);
            self.spans.push(Span { rank, stream, label, kind, stage, start, end });
        }
    }
}
