//! Attention of a plan on the ranks of a group: forward and backward of the caller's tensors, any number of them in flight.

use std::sync::{Arc, Mutex, MutexGuard};

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::PassPolicies;

use super::programs::{backward_program, forward_program, plan_identity};
use crate::monitor::lock;
use crate::{
    Backend, Call, ExecError, Group, GroupRank, Machine, Pass, PlanIdentity, Prepared, ProgramFault,
    TensorFault, Ticket, Transport,
};

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
    /// Written, where the spec asks for it: the same on all ranks.
    pub max_logits: Option<&'a B::Buffer>,
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
    /// Read, where the spec has it.
    pub dlse: Option<&'a B::Buffer>,
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
    /// Makes attention of a plan ready, with one policy or one for each pass: local, on any thread. A plan that is not the same on all
    /// ranks is found in the first call.
    ///
    /// # Errors
    /// [`ExecError::Program`] for a plan of another number of ranks; [`ExecError::Policy`]; [`ExecError::OutOfMemory`]. The group is as
    /// before.
    pub fn attention(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        pass: Pass,
        policy: impl Into<PassPolicies>,
        deterministic: bool,
    ) -> Result<AttentionCalls<M>, ExecError> {
        let policy = policy.into();
        let identity = plan_identity(plan, spec, policy, deterministic);
        let task = Task { plan, spec, pass, policy, deterministic, identity };
        let ranks = self.ranks().iter().map(|rank| AttentionRank::of_task(rank, &task));
        Ok(AttentionCalls { ranks: ranks.collect::<Result<_, _>>()? })
    }
}

/// What is prepared.
struct Task<'a> {
    plan: &'a Plan,
    spec: &'a AttentionSpec,
    pass: Pass,
    policy: PassPolicies,
    deterministic: bool,
    identity: PlanIdentity,
}

impl<M: Machine> AttentionCalls<M> {
    /// The ranks that are in this process, in their order.
    pub fn ranks(&self) -> &[AttentionRank<M::Backend, M::Transport>] {
        &self.ranks
    }

    /// The operations of the forward of the ranks here, by their labels: what a CUDA graph has of two plans can only be exchanged where
    /// these are the same.
    pub fn forward_operations(&self) -> Vec<String> {
        self.ranks.iter().flat_map(|rank| labels(&lock(&rank.forward))).collect()
    }

    /// Likewise of the backward; none where the forward alone was prepared.
    pub fn backward_operations(&self) -> Vec<String> {
        let backwards = self.ranks.iter().filter_map(|rank| rank.backward.as_ref());
        backwards.flat_map(|backward| labels(&lock(backward))).collect()
    }

    /// Enqueues the forward of all ranks here from this thread: the tensors of each, in their order. With `streams`, one each, a
    /// rank's call begins behind what its stream was given before, and what that is given later comes behind the call.
    ///
    /// # Errors
    /// As [`AttentionRank::forward`]; nothing has been enqueued on any rank then.
    pub fn forward(
        &self,
        tensors: &[ForwardTensors<'_, M::Backend>],
        streams: Option<&[&Arc<StreamOf<M>>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let ranks: Vec<_> = self.ranks.iter().map(|rank| lock(&rank.forward)).collect();
        let named: Vec<_> = tensors.iter().map(ForwardTensors::named).collect();
        Prepared::call_ranks(&ranks.iter().map(|rank| &**rank).collect::<Vec<_>>(), &named, streams)
    }

    /// Likewise the backward.
    ///
    /// # Errors
    /// As [`AttentionRank::backward`]; nothing has been enqueued on any rank then.
    pub fn backward(
        &self,
        tensors: &[BackwardTensors<'_, M::Backend>],
        streams: Option<&[&Arc<StreamOf<M>>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let ranks: Vec<_> = self.ranks.iter().map(AttentionRank::backward_rank).collect::<Result<_, _>>()?;
        let named: Vec<_> = tensors.iter().map(BackwardTensors::named).collect();
        Prepared::call_ranks(&ranks.iter().map(|rank| &**rank).collect::<Vec<_>>(), &named, streams)
    }
}

fn labels<B: Backend, T: Transport<B>>(prepared: &Prepared<B, T>) -> Vec<String> {
    prepared.program().ops.iter().map(|op| op.label.to_string()).collect()
}

/// A stream of a machine's ranks.
type StreamOf<M> = <<M as Machine>::Backend as Backend>::Stream;

impl<B: Backend, T: Transport<B>> AttentionRank<B, T> {
    /// Makes attention of a plan ready on one rank; as [`Group::attention`].
    ///
    /// # Errors
    /// As there.
    pub fn prepare(
        rank: &Arc<GroupRank<B, T>>,
        plan: &Plan,
        spec: &AttentionSpec,
        pass: Pass,
        policy: impl Into<PassPolicies>,
        deterministic: bool,
    ) -> Result<Self, ExecError> {
        let policy = policy.into();
        let identity = plan_identity(plan, spec, policy, deterministic);
        Self::of_task(rank, &Task { plan, spec, pass, policy, deterministic, identity })
    }

    fn of_task(rank: &Arc<GroupRank<B, T>>, task: &Task<'_>) -> Result<Self, ExecError> {
        let Task { plan, spec, pass, policy, deterministic, identity } = task;
        if plan.ranks.len() != rank.world_size() {
            let reason = ProgramFault::OtherWorldSize { plan: plan.ranks.len(), group: rank.world_size() };
            return Err(ExecError::Program { program: "attention".to_owned(), rank: rank.rank(), reason });
        }
        let forward = forward_program(plan, rank.rank(), spec, policy.forward, *deterministic);
        if *pass == Pass::Forward {
            let forward = Mutex::new(Prepared::on(rank, forward, Some(identity))?);
            return Ok(Self { forward, backward: None });
        }
        let backward = backward_program(plan, rank.rank(), spec, policy.backward, *deterministic);
        let both = Prepared::both_on(rank, [forward, backward], Some(identity))?;
        let [forward, backward] = both.map(Mutex::new);
        Ok(Self { forward, backward: Some(backward) })
    }

    /// Enqueues a forward and returns at once; with `stream`, behind what that was given before, and before what it is given later.
    ///
    /// # Errors
    /// As [`Call::new`]: nothing has been enqueued then; the group's first error.
    pub fn forward(
        &self,
        tensors: &ForwardTensors<'_, B>,
        stream: Option<&Arc<B::Stream>>,
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
        stream: Option<&Arc<B::Stream>>,
    ) -> Result<Ticket<B>, ExecError> {
        let prepared = self.backward_rank()?;
        Call::new(&prepared, &tensors.named(), stream)?.enqueue()
    }

    fn backward_rank(&self) -> Result<MutexGuard<'_, Prepared<B, T>>, ExecError> {
        let missing = || ExecError::tensor("dout", TensorFault::NoBackward);
        self.backward.as_ref().map(lock).ok_or_else(missing)
    }
}

/// Tensors by the names of a Program's inputs and outputs.
type Named<B> = Vec<(&'static str, <B as Backend>::Buffer)>;

impl<B: Backend> ForwardTensors<'_, B> {
    fn named(&self) -> Named<B> {
        let Self { q, k, v, sink, out, lse, max_logits } = *self;
        named([
            ("q", Some(q)),
            ("k", Some(k)),
            ("v", Some(v)),
            ("sink", sink),
            ("out", Some(out)),
            ("lse", Some(lse)),
            ("max_logits", max_logits),
        ])
    }
}

impl<B: Backend> BackwardTensors<'_, B> {
    fn named(&self) -> Named<B> {
        let Self { dout, q, k, v, sink, out, lse, dlse, dq, dk, dv, dsink } = *self;
        let read = [("dout", Some(dout)), ("q", Some(q)), ("k", Some(k)), ("v", Some(v)), ("sink", sink)];
        let kept = [("out", Some(out)), ("lse", Some(lse)), ("dlse", dlse)];
        let written = [("dq", Some(dq)), ("dk", Some(dk)), ("dv", Some(dv)), ("dsink", dsink)];
        named(read.into_iter().chain(kept).chain(written))
    }
}

fn named<'a, T: Clone + 'a>(
    tensors: impl IntoIterator<Item = (&'static str, Option<&'a T>)>,
) -> Vec<(&'static str, T)> {
    tensors.into_iter().filter_map(|(name, tensor)| Some((name, tensor?.clone()))).collect()
}
