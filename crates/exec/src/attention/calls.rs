//! Attention of a plan on the ranks of a group: forward and backward of the caller's tensors, any number of them in flight.

use std::sync::{Arc, Mutex, MutexGuard};

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{PassPolicies, Program};

use super::{AttentionTask, StepTables};
use crate::monitor::lock;
use crate::{
    Backend, Call, ExecError, Group, GroupRank, Machine, Pass, Prepared, ProgramFault, TablesFault,
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
        self.attention_of(&AttentionTask::new(plan, spec, pass, policy, deterministic))
    }

    /// The same of a task: its step tables are made first.
    ///
    /// # Errors
    /// As [`Group::attention`].
    pub fn attention_of(&self, task: &AttentionTask<'_>) -> Result<AttentionCalls<M>, ExecError> {
        let ranks = self.ranks().iter().map(|rank| AttentionRank::of_task(rank, task));
        Ok(AttentionCalls { ranks: ranks.collect::<Result<_, _>>()? })
    }

    /// The same with step tables that were made ahead ([`AttentionTask::tables`]), those of each rank that is in this process, in their
    /// order: they are uploaded, and nothing is searched.
    ///
    /// # Errors
    /// [`ExecError::Tables`] for tables of something else; as [`Group::attention`].
    pub fn attention_with(
        &self,
        task: &AttentionTask<'_>,
        tables: &[TablesOfRank<M>],
    ) -> Result<AttentionCalls<M>, ExecError> {
        let (given, here) = (tables.len(), self.ranks().len());
        if given != here {
            let (rank, reason) = (self.ranks_here().start, TablesFault::Ranks { given, here });
            return Err(ExecError::Tables { rank, reason });
        }
        let ranks = self.ranks().iter().zip(tables);
        let ranks = ranks.map(|(rank, tables)| AttentionRank::of_tables(rank, task, tables));
        Ok(AttentionCalls { ranks: ranks.collect::<Result<_, _>>()? })
    }
}

/// Step tables of a machine's ranks.
pub type TablesOfRank<M> = StepTables<<<M as Machine>::Backend as Backend>::Device>;

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
        Self::of_task(rank, &AttentionTask::new(plan, spec, pass, policy, deterministic))
    }

    fn of_task(rank: &Arc<GroupRank<B, T>>, task: &AttentionTask<'_>) -> Result<Self, ExecError> {
        check_world_size(rank, task)?;
        rank.check()?;
        let programs = task.programs(rank.rank());
        let tables = StepTables::of_programs(&rank.backend().described(), &programs, task.identity())?;
        Self::of_programs(rank, programs, task, &tables)
    }

    /// By tables that were made ahead.
    fn of_tables(
        rank: &Arc<GroupRank<B, T>>,
        task: &AttentionTask<'_>,
        tables: &StepTables<B::Device>,
    ) -> Result<Self, ExecError> {
        check_world_size(rank, task)?;
        let programs = task.programs(rank.rank());
        let own = rank.rank();
        tables
            .check(own, &rank.backend().described(), task.identity(), programs.len())
            .map_err(|reason| ExecError::Tables { rank: own, reason })?;
        Self::of_programs(rank, programs, task, tables)
    }

    /// By tables that are theirs.
    fn of_programs(
        rank: &Arc<GroupRank<B, T>>,
        programs: Vec<Program>,
        task: &AttentionTask<'_>,
        tables: &StepTables<B::Device>,
    ) -> Result<Self, ExecError> {
        let programs = programs.into_iter().zip(tables.programs());
        let mut prepared = Prepared::all_on(rank, programs, task.identity())?.into_iter().map(Mutex::new);
        let Some(forward) = prepared.next() else { unreachable!("a task has a forward") };
        Ok(Self { forward, backward: prepared.next() })
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

/// Refuses a plan of another number of ranks.
fn check_world_size<B: Backend, T: Transport<B>>(
    rank: &GroupRank<B, T>,
    task: &AttentionTask<'_>,
) -> Result<(), ExecError> {
    let (plan, group) = (task.ranks(), rank.world_size());
    if plan == group {
        return Ok(());
    }
    let reason = ProgramFault::OtherWorldSize { plan, group };
    Err(ExecError::Program { program: "attention".to_owned(), rank: rank.rank(), reason })
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
