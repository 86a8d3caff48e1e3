//! The operations of a Program, made ready by the backend and the transport of its rank.

use counterpoint_schedule::{GroupCast, GroupReduce, Op, Program};

use crate::{Backend, CollectiveContext, ExecError, OpPlace, PlanIdentity, Transport};

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

/// Makes every operation ready.
pub(super) fn prepare<B: Backend, T: Transport<B>>(
    backend: &B,
    transport: &T,
    program: &Program,
    plan: Option<&PlanIdentity>,
) -> Result<Vec<PlacedStep<B, T>>, ExecError> {
    let context = CollectiveContext { buffers: &program.buffers, policy: &program.policy, plan };
    let mut steps = Vec::with_capacity(program.ops.len());
    for (index, op) in program.ops.iter().enumerate() {
        let place = OpPlace { index, label: op.label.as_str().into(), stage: op.stage };
        let cast = |cast: &GroupCast| -> Result<_, ExecError> {
            let collective = transport.prepare_cast(&place, cast, &context)?;
            let (arrive, signal) = (cast.arrive, cast.delivery.map(|delivery| delivery.signal.0));
            Ok(Step::Collective { collective, arrive: arrive.map(|barrier| barrier.0), signal })
        };
        let reduce = |reduce: &GroupReduce| -> Result<_, ExecError> {
            let collective = transport.prepare_reduce(&place, reduce, &context)?;
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
    Ok(steps)
}
