//! Attention made ready on tensors of its own, to be run and measured again and again.

use std::ops::Range;

use counterpoint_schedule::{BufferRole, Program, Timeline};

use super::programs::{backward_program, forward_program, plan_identity};
use super::{AttentionInputs, AttentionOutputs, RankProblem, RunConfig};
use crate::{
    Backend, ExecError, Group, HostTensor, Machine, Pass, PlanIdentity, Prepared, PreparedRank, RunTimes,
    TensorFault, Transport, WorldConfig,
};

/// Attention of this process's ranks, made ready to run again and again: tensors are on their devices, buffers allocated, operations
/// resolved. A training step keeps one for each of its layers' shapes and masks.
pub struct PreparedAttention<M: Machine> {
    here: Range<usize>,
    forward: Vec<PreparedRank<M>>,
    /// Empty without one.
    backward: Vec<PreparedRank<M>>,
}

impl<M: Machine> PreparedAttention<M> {
    /// Puts these ranks' rows of the inputs, in the order of ranks, where they are needed. Every process of a machine of several calls
    /// it, with an equal problem. Of `config` everything counts but how often and with which times to run.
    ///
    /// # Errors
    /// As [`run_attention_ranks`](super::run_attention_ranks).
    pub fn new(
        machine: &M,
        problem: &RankProblem<'_>,
        config: &RunConfig,
        inputs: Vec<AttentionInputs>,
    ) -> Result<Self, ExecError> {
        let mut setup = Setup::new(machine, problem, config, &inputs)?;
        let own = |program: &Program| program.bytes(|role| role != BufferRole::Input);
        let backward = setup.backward.iter().map(own).fold(0, u64::saturating_add);
        machine.check_memory(bytes(&setup.forward).saturating_add(backward), problem.host_bytes)?;
        let (forward, local) = setup.prepare_forward(inputs)?;
        let backward = match problem.pass {
            Pass::Forward => Vec::new(),
            Pass::ForwardBackward => setup.prepare_backward(&local, ForwardResults::of(&forward)?)?,
        };
        Ok(Self { here: setup.here, forward, backward })
    }

    /// Runs the forward of these ranks once; what they took.
    ///
    /// # Errors
    /// The first error of any rank.
    pub fn forward(&mut self, machine: &M) -> Result<Timeline, ExecError> {
        run_once(machine, "forward", &mut self.forward)
    }

    /// Likewise the backward, of the last forward.
    ///
    /// # Errors
    /// As [`PreparedAttention::forward`]; [`ExecError::Tensor`] where the problem was a forward alone.
    pub fn backward(&mut self, machine: &M) -> Result<Timeline, ExecError> {
        if self.backward.is_empty() {
            return Err(ExecError::tensor("dout", TensorFault::ForwardAlone));
        }
        run_once(machine, "backward", &mut self.backward)
    }

    /// Puts a tensor on the ranks' devices: of each rank here, in their order, its rows.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for another number of tensors than of ranks; [`ExecError::OutOfMemory`].
    pub fn upload(&self, name: &str, rows: Vec<HostTensor>) -> Result<Vec<RankBuffer<M>>, ExecError> {
        self.check_count(name, rows.len())?;
        let ranks = self.forward.iter().zip(rows);
        ranks.map(|(rank, rows)| rank.backend().upload(name, rows)).collect()
    }

    /// Has the next runs read `q`, `k`, `v`, `sink`, `dout` or `dlse` from these buffers, one for each rank here, which must stay as they are
    /// while a run reads them.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when there is no such input, or a buffer has not its shape and type.
    pub fn bind(&mut self, name: &str, buffers: &[RankBuffer<M>]) -> Result<(), ExecError> {
        self.check_count(name, buffers.len())?;
        // What backwards take of forwards is no input of the whole.
        let is_between = ["out", "lse"].contains(&name);
        let mut taken = false;
        for pass in [&mut self.forward, &mut self.backward] {
            for (rank, buffer) in pass.iter_mut().zip(buffers) {
                if !is_between && rank.takes(name) {
                    rank.bind(name, buffer.clone())?;
                    taken = true;
                }
            }
        }
        if taken {
            return Ok(());
        }
        Err(ExecError::tensor(name, TensorFault::NotAnInput))
    }

    /// The buffers of a result, `out`, `lse`, `max_logits`, `dq`, `dk`, `dv` or `dsink`, one for each rank here: what the last run left, until the next.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when there is no such result.
    pub fn result(&self, name: &str) -> Result<Vec<RankBuffer<M>>, ExecError> {
        match name {
            "out" | "lse" | "max_logits" => Prepared::buffers_of(&self.forward, name),
            _ if self.backward.is_empty() => Err(ExecError::tensor(name, TensorFault::ForwardAlone)),
            _ => Prepared::buffers_of(&self.backward, name),
        }
    }

    fn check_count(&self, name: &str, given: usize) -> Result<(), ExecError> {
        if given == self.here.len() {
            return Ok(());
        }
        let here = self.here.len();
        Err(ExecError::tensor(name, TensorFault::GivenFor { several: false, given, here }))
    }

    /// Which times runs take from the next one on.
    pub fn set_timing(&mut self, times: RunTimes) {
        self.forward.iter_mut().chain(&mut self.backward).for_each(|rank| rank.set_timing(times));
    }

    /// The ranks' forwards and backwards, for those who enqueue them another way.
    pub fn passes(&mut self) -> [&mut [PreparedRank<M>]; 2] {
        [&mut self.forward, &mut self.backward]
    }

    /// What the last runs have written, in the order of ranks, each with its rank.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn outputs(&self) -> Result<Vec<(usize, AttentionOutputs)>, ExecError> {
        rank_outputs(self.here.clone(), [&self.forward, &self.backward])
    }
}

/// What the last runs of these ranks' forwards and backwards, if there are any, have written, each with its rank.
///
/// # Errors
/// When the device has failed.
pub fn rank_outputs<B: Backend, T: Transport<B>>(
    here: Range<usize>,
    [forward, backward]: [&[Prepared<B, T>]; 2],
) -> Result<Vec<(usize, AttentionOutputs)>, ExecError> {
    let mut outputs = forward_outputs(here, forward)?;
    add_gradients(backward, &mut outputs)?;
    Ok(outputs)
}

/// What both passes of a problem need.
pub(super) struct Setup<'a, M: Machine> {
    machine: &'a M,
    group: Option<Group<M>>,
    config: WorldConfig,
    ranks: usize,
    identity: PlanIdentity,
    pub(super) here: Range<usize>,
    pub(super) forward: Vec<Program>,
    pub(super) backward: Vec<Program>,
}

impl<'a, M: Machine> Setup<'a, M> {
    pub(super) fn new(
        machine: &'a M,
        problem: &RankProblem<'_>,
        config: &RunConfig,
        inputs: &[AttentionInputs],
    ) -> Result<Self, ExecError> {
        let RankProblem { plan, spec, pass, .. } = *problem;
        let here = machine.ranks_here(plan.ranks.len());
        if inputs.len() != here.len() {
            let (given, here) = (inputs.len(), here.len());
            return Err(ExecError::tensor("rows", TensorFault::GivenFor { several: true, given, here }));
        }
        for (rank, inputs) in plan.ranks[here.clone()].iter().zip(inputs) {
            inputs.check((rank.q_rows, rank.k_rows), spec)?;
        }
        let RunConfig { policy, deterministic, .. } = *config;
        let forward =
            here.clone().map(|rank| forward_program(plan, rank, spec, policy.forward, deterministic));
        let backward = here
            .clone()
            .filter(|_| pass == Pass::ForwardBackward)
            .map(|rank| backward_program(plan, rank, spec, policy.backward, deterministic));
        Ok(Self {
            machine,
            group: None,
            config: config.world.clone(),
            ranks: plan.ranks.len(),
            identity: plan_identity(plan, spec, policy, deterministic),
            forward: forward.collect(),
            backward: backward.collect(),
            here,
        })
    }

    /// Of all passes, connected by the first.
    fn group(&mut self) -> Result<Group<M>, ExecError> {
        match &self.group {
            Some(group) => Ok(group.clone()),
            None => {
                let group = Group::connect(self.machine, self.ranks, self.config.clone())?;
                Ok(self.group.insert(group).clone())
            }
        }
    }

    fn prepare(&self, group: &Group<M>, programs: &[Program]) -> Result<Vec<PreparedRank<M>>, ExecError> {
        let first = self.here.start;
        let prepared = group.prepare(|rank| programs[rank - first].clone(), Some(&self.identity));
        // Other ranks wait for this one by now: they are to hear of it.
        prepared.map_err(|error| group.fail_with(error.of_rank(first)))
    }

    /// The ranks' forwards, and the inputs where they are.
    pub(super) fn prepare_forward(
        &mut self,
        inputs: Vec<AttentionInputs>,
    ) -> Result<WithInputs<M>, ExecError> {
        let group = self.group()?;
        let mut forward = self.prepare(&group, &self.forward)?;
        forward.iter_mut().try_for_each(Prepared::own_outputs)?;
        let mut local = Vec::with_capacity(forward.len());
        for (prepared, inputs) in forward.iter_mut().zip(inputs) {
            let inputs = LocalInputs::<M>::upload(inputs, prepared.backend())?;
            inputs.bind(prepared)?;
            local.push(inputs);
        }
        Ok((forward, local))
    }

    /// The ranks' backwards, of what their forwards left.
    pub(super) fn prepare_backward(
        &mut self,
        local: &[LocalInputs<M>],
        ForwardResults { out, lse }: ForwardResults<M>,
    ) -> Result<Vec<PreparedRank<M>>, ExecError> {
        let group = self.group()?;
        let mut backward = self.prepare(&group, &self.backward)?;
        backward.iter_mut().try_for_each(Prepared::own_outputs)?;
        for ((prepared, local), (out, lse)) in backward.iter_mut().zip(local).zip(out.into_iter().zip(lse)) {
            local.bind(prepared)?;
            prepared.bind("out", out)?;
            prepared.bind("lse", lse)?;
        }
        Ok(backward)
    }
}

/// Ranks, and the inputs of each.
type WithInputs<M> = (Vec<PreparedRank<M>>, Vec<LocalInputs<M>>);

/// Bytes of all buffers of all ranks.
pub(super) fn bytes(programs: &[Program]) -> u64 {
    programs.iter().map(|program| program.bytes(|_| true)).fold(0, u64::saturating_add)
}

/// A tensor of one rank of a machine, on its device.
pub type RankBuffer<M> = <<M as Machine>::Backend as Backend>::Buffer;

/// One run, of all ranks of a process.
pub(super) fn run_once<M: Machine>(
    machine: &M,
    pass: &str,
    ranks: &mut [PreparedRank<M>],
) -> Result<Timeline, ExecError> {
    // Processes have clocks of their own: all begin when the last one is ready.
    machine.barrier(pass)?;
    Prepared::run_ranks(ranks)
}

/// What backwards read of forwards, in the order of ranks.
pub(super) struct ForwardResults<M: Machine> {
    out: Vec<RankBuffer<M>>,
    lse: Vec<RankBuffer<M>>,
}

impl<M: Machine> ForwardResults<M> {
    pub(super) fn of(forward: &[PreparedRank<M>]) -> Result<Self, ExecError> {
        Ok(Self { out: Prepared::buffers_of(forward, "out")?, lse: Prepared::buffers_of(forward, "lse")? })
    }
}

pub(super) fn forward_outputs<B: Backend, T: Transport<B>>(
    here: Range<usize>,
    forward: &[Prepared<B, T>],
) -> Result<Vec<(usize, AttentionOutputs)>, ExecError> {
    let results = |prepared: &Prepared<B, T>| -> Result<AttentionOutputs, ExecError> {
        let result = |name: &str| download(prepared, name);
        let max_logits = prepared.buffer("max_logits").is_some().then(|| result("max_logits")).transpose()?;
        let (out, lse) = (result("out")?, result("lse")?);
        Ok(AttentionOutputs { out, lse, max_logits, dq: None, dk: None, dv: None, dsink: None })
    };
    here.zip(forward).map(|(rank, prepared)| Ok((rank, results(prepared)?))).collect()
}

pub(super) fn add_gradients<B: Backend, T: Transport<B>>(
    backward: &[Prepared<B, T>],
    outputs: &mut [(usize, AttentionOutputs)],
) -> Result<(), ExecError> {
    for (prepared, (_, outputs)) in backward.iter().zip(outputs) {
        let gradient = |name: &str| download(prepared, name).map(Some);
        (outputs.dq, outputs.dk, outputs.dv) = (gradient("dq")?, gradient("dk")?, gradient("dv")?);
        if prepared.buffer("dsink").is_some() {
            outputs.dsink = gradient("dsink")?;
        }
    }
    Ok(())
}

/// A rank's rows of the inputs, shared by forward and backward.
pub(super) struct LocalInputs<M: Machine> {
    tensors: Vec<(&'static str, RankBuffer<M>)>,
}

impl<M: Machine> LocalInputs<M> {
    fn upload(inputs: AttentionInputs, backend: &M::Backend) -> Result<Self, ExecError> {
        let AttentionInputs { q, k, v, sink, dout, dlse } = inputs;
        let given = [("q", Some(q)), ("k", Some(k)), ("v", Some(v))];
        let all = given.into_iter().chain([("sink", sink), ("dout", dout), ("dlse", dlse)]);
        let present = all.filter_map(|(name, tensor)| Some((name, tensor?)));
        let upload = |(name, tensor)| Ok::<_, ExecError>((name, backend.upload(name, tensor)?));
        Ok(Self { tensors: present.map(upload).collect::<Result<_, _>>()? })
    }

    /// Binds those that the Program asks for.
    fn bind(&self, prepared: &mut PreparedRank<M>) -> Result<(), ExecError> {
        for (name, buffer) in &self.tensors {
            if prepared.takes(name) {
                prepared.bind(name, buffer.clone())?;
            }
        }
        Ok(())
    }
}

fn download<B: Backend, T: Transport<B>>(rank: &Prepared<B, T>, name: &str) -> Result<HostTensor, ExecError> {
    let buffers = Prepared::buffers_of(std::slice::from_ref(rank), name)?;
    rank.backend().download(&buffers[0])
}
