//! The seam to the engine: attention and row collectives of the ranks in this process, on tensors of Python, in place.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use counterpoint_exec::{
    AttentionCalls, BackwardTensors, BufferAccess, Call, CpuBackend, CpuBuffer, ExecError, ForwardTensors,
    Group, HostView, Machine, Pass, Prepared, RunTimes, Ticket,
};
use counterpoint_plan::Dispatch;
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, Timeline, lower_attention_backward, lower_attention_forward,
};

use crate::borrow::Borrowed;
use crate::row_program::{RowCollective, row_program};
use crate::solution::Content;

/// Tensors of one call, by the names of the Program's inputs and outputs.
pub(crate) type Named = Vec<(&'static str, Borrowed)>;

/// One pass of attention of the ranks in this process. Tensors hold the rows of these ranks, one rank after the other.
pub(crate) struct AttentionCall {
    pub(crate) content: Arc<Content>,
    pub(crate) policy: OverlapPolicy,
    pub(crate) deterministic: bool,
    pub(crate) backward: bool,
    /// Whether times are taken.
    pub(crate) measured: bool,
    pub(crate) inputs: Named,
    pub(crate) outputs: Named,
}

/// What the engine does for a group of ranks.
pub(crate) trait Engine: Send + Sync {
    /// Returns once the results are written; with times where they were asked for.
    fn attention(&self, call: &AttentionCall) -> Result<Option<Timeline>, ExecError>;
    /// Likewise.
    fn rows(
        &self,
        dispatch: &Dispatch,
        what: RowCollective,
        from: &Borrowed,
        to: &Borrowed,
    ) -> Result<(), ExecError>;
    /// The first error, as far as it is known here.
    fn poll(&self) -> Result<(), ExecError>;
    /// Ends the group for all ranks.
    fn fail(&self, reason: &str);
    /// Returns once all ranks have called it and all calls have ended.
    fn close(&self) -> Result<(), ExecError>;
}

/// Plans that stay prepared. Preparing one and letting go of it asks no other rank.
const KEPT: usize = 64;

/// A prepared plan, and for which of its settings.
struct Ready<M: Machine> {
    content: Arc<Content>,
    policy: OverlapPolicy,
    deterministic: bool,
    calls: Arc<AttentionCalls<M>>,
}

/// Ranks of a machine that have joined.
pub(crate) struct Joined<M: Machine> {
    group: Group<M>,
    /// Latest first.
    ready: Mutex<Vec<Ready<M>>>,
    /// Ranks that wait for each other must be called in one order.
    calling: Mutex<()>,
}

/// Buffers of one rank, by name.
type Buffers = Vec<(&'static str, CpuBuffer)>;

impl<M: Machine<Backend = CpuBackend>> Joined<M> {
    pub(crate) fn new(group: Group<M>) -> Self {
        Self { group, ready: Mutex::new(Vec::new()), calling: Mutex::new(()) }
    }

    fn ready(&self, call: &AttentionCall) -> Result<Arc<AttentionCalls<M>>, ExecError> {
        let AttentionCall { content, policy, deterministic, .. } = call;
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |ready: &Ready<M>| {
            Arc::ptr_eq(&ready.content, content)
                && (ready.policy, ready.deterministic) == (*policy, *deterministic)
        };
        let at = match ready.iter().position(is_it) {
            Some(index) => ready.remove(index),
            None => {
                let (plan, spec) = (&content.plan, &content.spec);
                let calls =
                    self.group.attention(plan, spec, Pass::ForwardBackward, *policy, *deterministic)?;
                let (content, calls) = (content.clone(), Arc::new(calls));
                Ready { content, policy: *policy, deterministic: *deterministic, calls }
            }
        };
        let calls = at.calls.clone();
        ready.insert(0, at);
        ready.truncate(KEPT);
        Ok(calls)
    }

    /// The tensors of every rank here, each rank's rows of them.
    fn split(&self, call: &AttentionCall) -> Result<Vec<Buffers>, ExecError> {
        let mut starts = vec![0; call.inputs.len() + call.outputs.len()];
        let mut of_rank = |rank: usize| {
            let read = call.inputs.iter().map(|named| (named, BufferAccess::Read));
            let written = call.outputs.iter().map(|named| (named, BufferAccess::Write));
            let all = read.chain(written).zip(&mut starts);
            all.map(|(((name, tensor), access), start)| {
                let rows = match *name {
                    "sink" => tensor.rows(),
                    // One after the other, a copy for each rank here.
                    "dsink" => call.content.spec.seqlen_sink,
                    "k" | "v" | "dk" | "dv" => call.content.rows(rank, true),
                    _ => call.content.rows(rank, false),
                };
                let first = if *name == "sink" { 0 } else { *start };
                *start += rows;
                Ok((*name, buffer(rank, name, tensor.view(first..first + rows, access)?)))
            })
            .collect::<Result<Buffers, ExecError>>()
        };
        self.group.ranks_here().map(&mut of_rank).collect()
    }

    /// As a call, with times. Strided tensors are not for it.
    fn measure(&self, call: &AttentionCall, tensors: Vec<Buffers>) -> Result<Timeline, ExecError> {
        let AttentionCall { content, policy, deterministic, backward, .. } = call;
        let Content { plan, spec, .. } = &**content;
        let blocks = if *deterministic { KeyBlocks::Aligned } else { KeyBlocks::Suited };
        let reduction =
            if *deterministic { GradientReduction::Deterministic } else { GradientReduction::PerStage };
        let lower = |rank| match *backward {
            false => lower_attention_forward(plan, rank, spec, *policy, blocks),
            true => lower_attention_backward(plan, rank, spec, *policy, reduction),
        };
        let mut ranks = self.group.prepare(lower, None)?;
        for (rank, buffers) in ranks.iter_mut().zip(tensors) {
            rank.take_times(RunTimes::Operations);
            buffers.into_iter().try_for_each(|(name, buffer)| rank.bind(name, buffer))?;
        }
        Prepared::run_ranks(&mut ranks)
    }
}

impl<M> Engine for Joined<M>
where
    M: Machine<Backend = CpuBackend> + Send + Sync,
    Group<M>: Send + Sync,
    AttentionCalls<M>: Send + Sync,
{
    fn attention(&self, call: &AttentionCall) -> Result<Option<Timeline>, ExecError> {
        self.group.poll()?;
        let calls = self.ready(call)?;
        let tensors = self.split(call)?;
        let _one = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        if call.measured {
            return self.measure(call, tensors).map(Some);
        }
        let missing =
            |name: &str| ExecError::Tensor { name: name.to_owned(), reason: "is missing".to_owned() };
        let find =
            |rank: usize, name: &str| tensors[rank].iter().find(|(known, _)| *known == name).map(|(_, b)| b);
        let get = |rank: usize, name: &str| find(rank, name).ok_or_else(|| missing(name));
        let ranks = 0..tensors.len();
        let tickets = match call.backward {
            false => {
                let forward = |rank| {
                    Ok(ForwardTensors {
                        q: get(rank, "q")?,
                        k: get(rank, "k")?,
                        v: get(rank, "v")?,
                        sink: find(rank, "sink"),
                        out: get(rank, "out")?,
                        lse: get(rank, "lse")?,
                    })
                };
                calls.forward(&ranks.map(forward).collect::<Result<Vec<_>, ExecError>>()?, None)?
            }
            true => {
                let backward = |rank| {
                    Ok(BackwardTensors {
                        dout: get(rank, "dout")?,
                        q: get(rank, "q")?,
                        k: get(rank, "k")?,
                        v: get(rank, "v")?,
                        sink: find(rank, "sink"),
                        out: get(rank, "out")?,
                        lse: get(rank, "lse")?,
                        dq: get(rank, "dq")?,
                        dk: get(rank, "dk")?,
                        dv: get(rank, "dv")?,
                        dsink: find(rank, "dsink"),
                    })
                };
                calls.backward(&ranks.map(backward).collect::<Result<Vec<_>, ExecError>>()?, None)?
            }
        };
        tickets.iter().try_for_each(Ticket::wait)?;
        Ok(None)
    }

    fn rows(
        &self,
        dispatch: &Dispatch,
        what: RowCollective,
        from: &Borrowed,
        to: &Borrowed,
    ) -> Result<(), ExecError> {
        self.group.poll()?;
        let Range { start: rank, .. } = self.group.ranks_here();
        let _one = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        let program = |rank| row_program(rank, dispatch, what, from, to);
        let prepared = self.group.prepare(program, None)?;
        let tensors = [
            ("from", buffer(rank, "from", from.view(0..from.rows(), BufferAccess::Read)?)),
            ("to", buffer(rank, "to", to.view(0..to.rows(), BufferAccess::Write)?)),
        ];
        let calls = prepared.iter().map(|rank| Call::new(rank, &tensors, None)).collect::<Result<_, _>>()?;
        Call::enqueue_ranks(calls)?.iter().try_for_each(Ticket::wait)
    }

    fn poll(&self) -> Result<(), ExecError> {
        self.group.poll()
    }

    fn fail(&self, reason: &str) {
        self.group.fail(reason);
    }

    fn close(&self) -> Result<(), ExecError> {
        let _one = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        self.group.close()
    }
}

fn buffer(rank: usize, name: &str, view: HostView) -> CpuBuffer {
    CpuBuffer::borrowed(rank, name, view)
}
