//! Vector clocks over the streams of a Program: what is certainly finished when an operation starts.

use super::{ProgramError, ProgramThing};
use crate::{GroupCast, Op, Program, RowArrivals, SignalId};

impl Program {
    /// For every operation, what is certainly finished before it starts and before it reads what arrives meanwhile.
    // Long: one loop over all ranks, whose state every operation changes.
    pub(super) fn clocks(&self) -> Result<Vec<Clocks>, ProgramError> {
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
                return Err(self.unknown(index, ProgramThing::Stream));
            };
            match &op.op {
                Op::Record(event) => match events.get_mut(event.0) {
                    None => return Err(self.unknown(index, ProgramThing::Event)),
                    Some(Some(_)) => {
                        let (op, label, event) = (index, op.label.clone(), event.0);
                        return Err(ProgramError::RecordedTwice { op, label, event });
                    }
                    Some(slot) => *slot = Some(clock.clone()),
                },
                Op::Wait(event) => match events.get(event.0) {
                    None => return Err(self.unknown(index, ProgramThing::Event)),
                    Some(None) => return Err(no_producer(index, ProgramThing::Event)),
                    Some(Some(other)) => clock.join(other),
                },
                Op::Await { barrier, arrivals: wanted } => match arrivals.get(barrier.0) {
                    None => return Err(self.unknown(index, ProgramThing::Barrier)),
                    Some(have) if have < wanted => return Err(no_producer(index, ProgramThing::Barrier)),
                    Some(_) => {}
                },
                Op::Signal { signal: SignalId(signal), value } => match signals.get_mut(*signal) {
                    None => return Err(self.unknown(index, ProgramThing::Signal)),
                    Some(raised) => raised.push((*value, clock.clone())),
                },
                Op::WaitSignal { signal: SignalId(signal), value } => {
                    let Some(raised) = signals.get(*signal) else {
                        return Err(self.unknown(index, ProgramThing::Signal));
                    };
                    clock = enough(raised, *value, &clock)
                        .ok_or_else(|| no_producer(index, ProgramThing::Signal))?;
                }
                Op::GroupCast(GroupCast { delivery: Some(delivery), .. }) => {
                    let Some(raised) = signals.get_mut(delivery.signal.0) else {
                        return Err(self.unknown(index, ProgramThing::Signal));
                    };
                    let mut finished = clock.clone();
                    finished.finished[stream] = Some(Step::whole(index));
                    raised.push((delivery.parts as u64, finished));
                }
                _ => {}
            }
            for barrier in op.op.arrives() {
                *arrivals.get_mut(barrier.0).ok_or_else(|| self.unknown(index, ProgramThing::Barrier))? += 1;
            }
            // What this rank sends in the same cast may be under way for longer, so later operations know nothing more.
            let mut delivered = clock.clone();
            if let Some(keys) = op.op.arriving() {
                let Some(raised) = signals.get(keys.delivery.signal.0) else {
                    return Err(self.unknown(index, ProgramThing::Signal));
                };
                let [(parts, cast)] = &raised[..] else {
                    return Err(no_producer(index, ProgramThing::Delivery));
                };
                if *parts != keys.delivery.parts as u64 {
                    return Err(no_producer(index, ProgramThing::DeliveryInParts));
                }
                delivered.join(cast);
            }
            let mut arrived = Vec::new();
            if let Some(RowArrivals { signal, values }) = op.op.arrivals() {
                let Some(raised) = signals.get(signal.0) else {
                    return Err(self.unknown(index, ProgramThing::Signal));
                };
                for value in values {
                    let enough = enough(raised, *value, &clock);
                    arrived.push(enough.ok_or_else(|| no_producer(index, ProgramThing::Signal))?);
                }
            }
            if let Some((signal, parts)) = op.op.raises() {
                let Some(raised) = signals.get_mut(signal.0) else {
                    return Err(self.unknown(index, ProgramThing::Signal));
                };
                for part in 0..parts {
                    let mut so_far = arrived.get(part).unwrap_or(&clock).clone();
                    so_far.finished[stream] = Some(Step { op: index, part });
                    raised.push((part as u64 + 1, so_far));
                }
            }
            let start = clock.clone();
            arrived.iter().for_each(|part| clock.join(part));
            out.push(Clocks { start, delivered, arrived });
            clock.finished[stream] = Some(Step::whole(index));
            streams[stream] = clock;
        }
        Ok(out)
    }
}

/// What is certainly finished once a signal that was raised so is at least `value`, for who knows `clock` already; `None` where nothing raises
/// it that far. Whichever sufficient raise comes first is enough: only what precedes all of them is certain.
fn enough(raised: &[(u64, Clock)], value: u64, clock: &Clock) -> Option<Clock> {
    if value == 0 {
        return Some(clock.clone());
    }
    let enough = raised.iter().filter(|(raised, _)| *raised >= value).map(|(_, clock)| clock.clone());
    let mut known = enough.reduce(Clock::meet)?;
    known.join(clock);
    Some(known)
}

/// What is certainly finished at points of an operation.
#[derive(Clone, Debug)]
pub(super) struct Clocks {
    /// When it starts.
    pub(super) start: Clock,
    /// When what arrives meanwhile is there.
    pub(super) delivered: Clock,
    /// When each of its parts begins, where these wait for rows that arrive one after the other.
    pub(super) arrived: Vec<Clock>,
}

impl Clocks {
    /// When a part begins.
    pub(super) fn of_part(&self, part: usize) -> &Clock {
        self.arrived.get(part).unwrap_or(&self.start)
    }
}

/// An operation, or a part of one that others may see finished before the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Step {
    pub(super) op: usize,
    pub(super) part: usize,
}

impl Step {
    /// All parts.
    pub(super) fn whole(op: usize) -> Self {
        Self { op, part: usize::MAX }
    }
}

/// The last finished step of each stream: a vector clock.
#[derive(Clone, Debug)]
pub(super) struct Clock {
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
    pub(super) fn follows(&self, stream: usize, step: Step) -> bool {
        self.finished[stream].is_some_and(|last| last >= step)
    }
}
