//! Attention of a plan on the ranks of a group: forward and backward of the caller's tensors, any number of them in flight.

use std::sync::{Mutex, MutexGuard};

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::OverlapPolicy;

use super::{Group, Ticket};
use crate::attention::{backward_program, forward_program, plan_identity};
use crate::monitor::lock;
use crate::{Backend, Call, ExecError, Machine, Pass, Prepared, Transport};

/// Attention of a plan, prepared on the ranks of a group that are in this process. It keeps nothing between calls: what a backward
/// needs of its forward is in tensors of the caller.
pub struct AttentionCalls<M: Machine> {
    ranks: Vec<AttentionRank<M::Backend, M::Transport>>,
}

/// Attention of a plan on one rank.
pub struct AttentionRank<B: Backend, T: Transport<B>> {
    forward: Mutex<Prepared<B, T>>,
    backward: Option<Mutex<Prepared<B, T>>>,
}

/// A rank's tensors of a forward, shapes as in [`AttentionSpec`] with the rank's own rows.
#[derive(Debug)]
pub struct ForwardTensors<'a, B: Backend> {
    /// Read.
    pub q: &'a B::Buffer,
    /// Read.
    pub k: &'a B::Buffer,
    /// Read.
    pub v: &'a B::Buffer,
    /// Read, where the spec has a sink.
    pub sink: Option<&'a B::Buffer>,
    /// Written.
    pub out: &'a B::Buffer,
    /// Written.
    pub lse: &'a B::Buffer,
}

/// A rank's tensors of a backward.
#[derive(Debug)]
pub struct BackwardTensors<'a, B: Backend> {
    /// Read; likewise those up to `lse`, which are the forward's.
    pub dout: &'a B::Buffer,
    /// Read.
    pub q: &'a B::Buffer,
    /// Read.
    pub k: &'a B::Buffer,
    /// Read.
    pub v: &'a B::Buffer,
    /// Read, where the spec has a sink.
    pub sink: Option<&'a B::Buffer>,
    /// Read.
    pub out: &'a B::Buffer,
    /// Read.
    pub lse: &'a B::Buffer,
    /// Written; likewise the rest.
    pub dq: &'a B::Buffer,
    /// Written.
    pub dk: &'a B::Buffer,
    /// Written.
    pub dv: &'a B::Buffer,
    /// Written, where the spec has a sink: the sum over all ranks.
    pub dsink: Option<&'a B::Buffer>,
}

impl<M: Machine> Group<M> {
    /// Makes attention of a plan ready: local, on any thread. A plan that is not the same on all ranks is found in the first call.
    ///
    /// # Errors
    /// [`ExecError::Program`] for a plan of another number of ranks; [`ExecError::Policy`]; [`ExecError::OutOfMemory`]. The group is as
    /// before.
    pub fn attention(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        pass: Pass,
        policy: OverlapPolicy,
        deterministic: bool,
    ) -> Result<AttentionCalls<M>, ExecError> {
        if plan.ranks.len() != self.world_size() {
            let reason = format!(
                "the plan is for {} ranks, and the group has {}",
                plan.ranks.len(),
                self.world_size()
            );
            let program = "attention".to_owned();
            return Err(ExecError::Program { program, rank: self.ranks_here().start, reason });
        }
        let identity = plan_identity(plan, spec, policy, deterministic);
        let forward =
            self.prepare(|rank| forward_program(plan, rank, spec, policy, deterministic), Some(&identity))?;
        let backward: Vec<_> = match pass {
            Pass::Forward => forward.iter().map(|_| None).collect(),
            Pass::ForwardBackward => {
                let lower = |rank| backward_program(plan, rank, spec, policy, deterministic);
                self.prepare(lower, Some(&identity))?.into_iter().map(|rank| Some(Mutex::new(rank))).collect()
            }
        };
        let ranks = forward.into_iter().zip(backward);
        let rank = |(forward, backward)| AttentionRank { forward: Mutex::new(forward), backward };
        Ok(AttentionCalls { ranks: ranks.map(rank).collect() })
    }
}

impl<M: Machine> AttentionCalls<M> {
    /// The ranks that are in this process, in their order.
    pub fn ranks(&self) -> &[AttentionRank<M::Backend, M::Transport>] {
        &self.ranks
    }

    /// Enqueues the forward of all ranks here from this thread: the tensors of each, in their order. With `streams`, one each, a
    /// rank's call begins behind what its stream was given before, and what that is given later comes behind the call.
    ///
    /// # Errors
    /// As [`AttentionRank::forward`]; nothing has been enqueued on any rank then.
    pub fn forward(
        &self,
        tensors: &[ForwardTensors<'_, M::Backend>],
        streams: Option<&[&StreamOf<M>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let prepared = self.ranks.iter().map(|rank| lock(&rank.forward)).collect();
        enqueue_ranks(prepared, tensors.iter().map(ForwardTensors::named).collect(), streams)
    }

    /// Likewise the backward.
    ///
    /// # Errors
    /// As [`AttentionRank::backward`]; nothing has been enqueued on any rank then.
    pub fn backward(
        &self,
        tensors: &[BackwardTensors<'_, M::Backend>],
        streams: Option<&[&StreamOf<M>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let prepared = self.ranks.iter().map(AttentionRank::backward_rank).collect::<Result<_, _>>()?;
        enqueue_ranks(prepared, tensors.iter().map(BackwardTensors::named).collect(), streams)
    }
}

/// A stream of a machine's ranks.
type StreamOf<M> = <<M as Machine>::Backend as Backend>::Stream;

impl<B: Backend, T: Transport<B>> AttentionRank<B, T> {
    /// Enqueues a forward and returns at once; with `stream`, behind what that was given before, and before what it is given later.
    ///
    /// # Errors
    /// As [`Call::new`]: nothing has been enqueued then; the group's first error.
    pub fn forward(
        &self,
        tensors: &ForwardTensors<'_, B>,
        stream: Option<&B::Stream>,
    ) -> Result<Ticket<B>, ExecError> {
        Call::new(&lock(&self.forward), &tensors.named(), stream)?.enqueue()
    }

    /// Enqueues a backward and returns at once.
    ///
    /// # Errors
    /// As [`AttentionRank::forward`]; [`ExecError::Tensor`] where the forward alone was prepared.
    pub fn backward(
        &self,
        tensors: &BackwardTensors<'_, B>,
        stream: Option<&B::Stream>,
    ) -> Result<Ticket<B>, ExecError> {
        let prepared = self.backward_rank()?;
        Call::new(&prepared, &tensors.named(), stream)?.enqueue()
    }

    fn backward_rank(&self) -> Result<MutexGuard<'_, Prepared<B, T>>, ExecError> {
        let reason = || "there is no backward: the forward alone was prepared".to_owned();
        let missing = || ExecError::Tensor { name: "dout".to_owned(), reason: reason() };
        self.backward.as_ref().map(lock).ok_or_else(missing)
    }
}

/// Tensors by the names of a Program's inputs and outputs.
type Named<B> = Vec<(&'static str, <B as Backend>::Buffer)>;

impl<B: Backend> ForwardTensors<'_, B> {
    fn named(&self) -> Named<B> {
        let Self { q, k, v, sink, out, lse } = *self;
        named([
            ("q", Some(q)),
            ("k", Some(k)),
            ("v", Some(v)),
            ("sink", sink),
            ("out", Some(out)),
            ("lse", Some(lse)),
        ])
    }
}

impl<B: Backend> BackwardTensors<'_, B> {
    fn named(&self) -> Named<B> {
        let Self { dout, q, k, v, sink, out, lse, dq, dk, dv, dsink } = *self;
        let read = [("dout", Some(dout)), ("q", Some(q)), ("k", Some(k)), ("v", Some(v)), ("sink", sink)];
        let kept = [("out", Some(out)), ("lse", Some(lse))];
        let written = [("dq", Some(dq)), ("dk", Some(dk)), ("dv", Some(dv)), ("dsink", dsink)];
        named(read.into_iter().chain(kept).chain(written))
    }
}

fn named<'a, T: Clone + 'a>(
    tensors: impl IntoIterator<Item = (&'static str, Option<&'a T>)>,
) -> Vec<(&'static str, T)> {
    tensors.into_iter().filter_map(|(name, tensor)| Some((name, tensor?.clone()))).collect()
}

fn enqueue_ranks<B: Backend, T: Transport<B>>(
    prepared: Vec<MutexGuard<'_, Prepared<B, T>>>,
    tensors: Vec<Named<B>>,
    streams: Option<&[&B::Stream]>,
) -> Result<Vec<Ticket<B>>, ExecError> {
    let given = streams.map_or(prepared.len(), <[_]>::len);
    if tensors.len() != prepared.len() || given != prepared.len() {
        let reason =
            format!("{} tensors and {given} streams for the {} ranks here", tensors.len(), prepared.len());
        return Err(ExecError::Tensor { name: "a call's tensors".to_owned(), reason });
    }
    let call = |(index, (prepared, tensors))| {
        let prepared: &MutexGuard<'_, Prepared<B, T>> = prepared;
        let tensors: &Named<B> = tensors;
        Call::new(prepared, tensors, streams.map(|streams| streams[index]))
    };
    Call::enqueue_ranks(prepared.iter().zip(&tensors).enumerate().map(call).collect::<Result<_, _>>()?)
}
