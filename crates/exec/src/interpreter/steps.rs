//! The operations of a Program, made ready by the backend and the transport of its rank.

use std::collections::HashSet;

use counterpoint_schedule::{BufferSpec, Op, Program};

use crate::{Backend, CollectiveContext, ExecError, OpPlace, PlanIdentity, TablesOf, Transport};

/// A step, its place and its stream.
pub(super) struct PlacedStep<B: Backend, T: Transport<B>> {
    pub(super) place: OpPlace,
    pub(super) stream: usize,
    pub(super) step: Step<B, T>,
}

/// An operation made ready.
pub(super) enum Step<B: Backend, T: Transport<B>> {
    Compute(B::Kernel),
    Collective { collective: T::Collective, arrive: Option<usize>, signal: Option<usize> },
    Record(usize),
    Wait(usize),
    Await { barrier: usize, arrivals: u64 },
    Signal { signal: usize, value: u64 },
    WaitSignal { signal: usize, value: u64 },
}

/// The collectives among them, in their order.
pub(super) fn collectives<B: Backend, T: Transport<B>>(
    steps: &[PlacedStep<B, T>],
) -> impl Iterator<Item = &T::Collective> {
    steps.iter().filter_map(|placed| match &placed.step {
        Step::Collective { collective, .. } => Some(collective),
        _ => None,
    })
}

/// Makes every operation ready by the Program's tables, those of a plan, for ranks that ask for it in this turn. The scratch memory that they need besides the
/// Program's buffers is added to `scratch`.
pub(super) fn prepare<B: Backend, T: Transport<B>>(
    backend: &B,
    transport: &T,
    (program, tables): (&Program, &TablesOf<B>),
    (plan, turn): (Option<&PlanIdentity>, Option<u64>),
    scratch: &mut Vec<BufferSpec>,
) -> Result<Vec<PlacedStep<B, T>>, ExecError> {
    let context = CollectiveContext { buffers: &program.buffers, policy: &program.policy, plan, turn: None };
    let mut collectives = 0;
    let mut steps = Vec::with_capacity(program.ops.len());
    for (index, op) in program.ops.iter().enumerate() {
        let place = OpPlace { index, label: op.label.as_str().into(), stage: op.stage };
        let mut numbered = || {
            collectives += 1;
            CollectiveContext { turn: turn.map(|turn| [turn, collectives]), ..context }
        };
        let mut step = |op: &Op| -> Result<Step<B, T>, ExecError> {
            Ok(match op {
                Op::GroupCast(cast) => Step::Collective {
                    collective: transport.prepare_cast(&place, cast, &numbered())?,
                    arrive: cast.arrive.map(|barrier| barrier.0),
                    signal: cast.delivery.map(|delivery| delivery.signal.0),
                },
                Op::GroupReduce(reduce) => Step::Collective {
                    collective: transport.prepare_reduce(&place, reduce, &numbered())?,
                    arrive: reduce.arrive.map(|barrier| barrier.0),
                    signal: None,
                },
                Op::Record(event) => Step::Record(event.0),
                Op::Wait(event) => Step::Wait(event.0),
                Op::Await { barrier, arrivals } => Step::Await { barrier: barrier.0, arrivals: *arrivals },
                Op::Signal { signal, value } => Step::Signal { signal: signal.0, value: *value },
                Op::WaitSignal { signal, value } => Step::WaitSignal { signal: signal.0, value: *value },
                _ => Step::Compute(backend.prepare(program, index, tables, scratch)?),
            })
        };
        let mut push = |step| steps.push(PlacedStep { place: place.clone(), stream: op.stream.0, step });
        match &op.op {
            Op::Fused(parts) => {
                let mut arrivals = op.op.arrives().map(|barrier| barrier.0);
                let (arrive, signal) = (arrivals.next(), op.op.arriving().map(|keys| keys.delivery.signal.0));
                // One kernel arrives once.
                let fused = match arrivals.next() {
                    None => transport.prepare_fused(backend, &place, parts, program, tables)?,
                    Some(_) => None,
                };
                match fused {
                    Some(collective) => push(Step::Collective { collective, arrive, signal }),
                    None => parts.iter().try_for_each(|part| step(part).map(&mut push))?,
                }
            }
            alone => push(step(alone)?),
        }
    }
    // What nothing waits for need not be recorded: on one rank a backward has no other stream that would.
    let awaited: HashSet<usize> = steps.iter().filter_map(|placed| placed.step.awaits()).collect();
    steps.retain(|placed| !matches!(placed.step, Step::Record(event) if !awaited.contains(&event)));
    Ok(steps)
}

impl<B: Backend, T: Transport<B>> Step<B, T> {
    /// The event that it waits for.
    fn awaits(&self) -> Option<usize> {
        match self {
            Self::Wait(event) => Some(*event),
            _ => None,
        }
    }
}
