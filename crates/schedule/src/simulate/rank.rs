//! A rank in the simulator: the heads of its streams, its hardware queue, and the workers that collectives hold.

use counterpoint_cost::WorkerSharing;

use super::{collective_part, parts_before_collective};
use crate::{HardwareQueues, Op, OverlapPolicy, Program, RowArrivals, WaveGemm, WorkerShare};

/// How far one rank's simulated run has got.
pub(super) struct Rank<'a> {
    pub(super) program: &'a Program,
    /// For every stream its operations, and the number of the collective where it is one.
    pub(super) queues: Vec<Vec<(usize, Option<usize>)>>,
    pub(super) collectives: usize,
    /// The head of every stream.
    pub(super) next: Vec<usize>,
    /// Of the head of every stream, the parts that have ended.
    pub(super) parts: Vec<usize>,
    /// And the first of those that have followed each other without a pause.
    pub(super) since: Vec<usize>,
    /// What the head of every stream does.
    pub(super) heads: Vec<Head>,
    /// When the head of every stream was reached.
    pub(super) reached: Vec<f64>,
    pub(super) events: Vec<bool>,
    pub(super) arrivals: Vec<u64>,
    pub(super) signals: Vec<u64>,
    /// With one hardware queue, the operation that it holds up all others for.
    queue_head: Option<usize>,
    /// Collectives that hold workers.
    pub(super) communicating: usize,
    /// Computations under way.
    pub(super) computing: Vec<Computing>,
    /// Seconds of all computations so far, had nothing slowed them.
    pub(super) computed_seconds: f64,
    /// When each port has moved what it was given.
    pub(super) port_free: [f64; 2],
}

/// What the operation at the head of a stream does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// Nothing: it was not reached, or waits for something.
    Waiting,
    /// Runs; a computation until its agenda entry of this number, unless its speed changes first.
    Running(u64),
}

/// A computation under way.
pub(super) struct Computing {
    pub(super) stream: usize,
    /// Seconds of work left at full speed, at `since`.
    pub(super) left: f64,
    pub(super) since: f64,
    pub(super) speed: f64,
}

impl<'a> Rank<'a> {
    pub(super) fn new(program: &'a Program) -> Self {
        let mut queues = vec![Vec::new(); program.streams.len()];
        let mut collectives = 0;
        for (index, op) in program.ops.iter().enumerate() {
            let number = collective_part(&op.op).map(|_| {
                collectives += 1;
                collectives - 1
            });
            queues[op.stream.0].push((index, number));
        }
        let streams = queues.len();
        Self {
            program,
            queues,
            collectives,
            next: vec![0; streams],
            parts: vec![0; streams],
            since: vec![0; streams],
            heads: vec![Head::Waiting; streams],
            reached: vec![0.0; streams],
            events: vec![false; program.num_events],
            arrivals: vec![0; program.num_barriers],
            signals: vec![0; program.num_signals],
            queue_head: (program.policy.queues == HardwareQueues::Single).then(|| holding_up(program, 0)),
            communicating: 0,
            computing: Vec::new(),
            computed_seconds: 0.0,
            port_free: [0.0; 2],
        }
    }

    /// The operation at the head of a stream, and the number of the collective where it is one: one that computes first is one
    /// from then on.
    pub(super) fn head(&self, stream: usize) -> Option<(usize, Option<usize>)> {
        let (op, collective) = self.queues[stream].get(self.next[stream]).copied()?;
        let arrives = self.parts[stream] >= parts_before_collective(&self.program.ops[op].op);
        Some((op, collective.filter(|_| arrives)))
    }

    pub(super) fn first_unfinished(&self) -> Option<usize> {
        (0..self.queues.len()).filter_map(|stream| self.head(stream)).map(|(op, _)| op).min()
    }

    /// Streams in the order in which their heads were queued.
    pub(super) fn streams_by_head(&self) -> Vec<usize> {
        let mut streams: Vec<usize> = (0..self.queues.len()).collect();
        streams.retain(|&stream| self.head(stream).is_some());
        streams.sort_by_key(|&stream| self.head(stream).map(|(op, _)| op));
        streams
    }

    /// Whether what a wait, or that part of a computation, waits for has happened.
    pub(super) fn is_released(&self, op: &Op, part: usize) -> bool {
        match op {
            Op::Wait(event) => self.events[event.0],
            Op::Await { barrier, arrivals } => self.arrivals[barrier.0] >= *arrivals,
            Op::WaitSignal { signal, value } => self.signals[signal.0] >= *value,
            Op::WaveGemm(WaveGemm { arrivals: Some(RowArrivals { signal, values }), .. }) => {
                values.get(part).is_none_or(|value| self.signals[signal.0] >= *value)
            }
            // What needs none of the rows comes first.
            other => other
                .arriving()
                .filter(|_| part > 0)
                .is_none_or(|keys| self.signals[keys.delivery.signal.0] >= keys.delivery.parts as u64),
        }
    }

    /// Whether the operation may start as far as hardware queues go.
    pub(super) fn may_issue(&self, op: usize, sharing: Option<WorkerSharing>) -> bool {
        sharing.is_none() || self.queue_head.is_none_or(|head| op <= head || passes(&self.program.ops[op].op))
    }

    /// `op` has started. The operation that may now, where there is one hardware queue and one left in it.
    pub(super) fn issued(&mut self, op: usize) -> Option<usize> {
        if self.queue_head != Some(op) {
            return None;
        }
        let next = holding_up(self.program, op + 1);
        self.queue_head = Some(next);
        (next < self.program.ops.len()).then_some(next)
    }

    /// Whether a collective's rows are moved by workers.
    pub(super) fn takes_workers(&self, op: usize) -> bool {
        !self.program.ops[op].op.is_left_to_engines(self.program.policy.mover)
    }

    /// Whether a collective finds the workers that it needs.
    pub(super) fn has_workers(&self, op: usize, sharing: Option<WorkerSharing>) -> bool {
        let Some(sharing) = sharing.filter(|_| self.takes_workers(op)) else { return true };
        let policy = &self.program.policy;
        let needed = taken_by(policy, &sharing, self.communicating + 1);
        needed == 0 || self.computing.is_empty() || needed <= policy.sm_margin()
    }

    /// Speed of a computation under the collectives under way.
    pub(super) fn speed(&self, sharing: Option<WorkerSharing>) -> f64 {
        let Some(sharing) = sharing else { return 1.0 };
        let policy = &self.program.policy;
        let set_aside = match policy.workers {
            WorkerShare::Common => 0,
            WorkerShare::Margin(workers) | WorkerShare::Partition(workers) => workers,
        };
        sharing.speed_without(set_aside.max(taken_by(policy, &sharing, self.communicating)))
    }
}

/// Of the workers that computations use, those that so many collectives hold.
fn taken_by(policy: &OverlapPolicy, sharing: &WorkerSharing, collectives: usize) -> usize {
    match policy.workers {
        WorkerShare::Partition(_) => 0,
        WorkerShare::Common | WorkerShare::Margin(_) => sharing.communication * collectives,
    }
}

/// The first operation from `from` on that holds up those queued behind it until it starts.
fn holding_up(program: &Program, from: usize) -> usize {
    let behind = program.ops.iter().skip(from).take_while(|op| passes(&op.op)).count();
    from + behind
}

/// Whether a hardware queue goes on without it: marks are written when what is before them in their stream has ended.
fn passes(op: &Op) -> bool {
    matches!(op, Op::Record(_) | Op::Signal { .. })
}
