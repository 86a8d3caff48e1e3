use std::sync::Arc;

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{
    BufferRole, BufferSpec, GradientReduction, KeyBlocks, Program, Timeline, lower_attention_backward,
    lower_attention_forward,
};

use super::{AttentionInputs, AttentionOutputs, RunConfig};
use crate::{
    Backend, ExecError, HostTensor, Machine, Pass, Prepared, RunTimes, Transport, World, WorldConfig,
};

/// What ranks are to compute.
#[derive(Clone, Copy, Debug)]
pub struct RankProblem<'a> {
    /// Of all ranks.
    pub plan: &'a Plan,
    /// The tensors.
    pub spec: &'a AttentionSpec,
    /// How much of it.
    pub pass: Pass,
    /// Bytes of tensors that the caller holds beside the ranks' own.
    pub host_bytes: u64,
}

/// What the ranks of one process gave.
#[derive(Clone, Debug, PartialEq)]
pub struct RanksRun {
    /// Results in the order of ranks, each with its rank.
    pub outputs: Vec<(usize, AttentionOutputs)>,
    /// Measured forward of these ranks.
    pub forward: Timeline,
    /// Measured backward.
    pub backward: Option<Timeline>,
    /// Seconds of every measured forward: from the start of the first operation of any of these ranks to the end of the last.
    pub forward_seconds: Vec<f64>,
    /// Likewise of the backward; empty without one.
    pub backward_seconds: Vec<f64>,
}

/// Runs the forward (and the backward, where the problem asks for it) of those ranks that are in this process, on their rows
/// of the inputs, in the order of ranks. Every process of a machine of several calls it, with an equal problem.
///
/// # Errors
/// [`ExecError::Tensor`] when a tensor does not fit the plan; [`ExecError::OutOfMemory`], before anything is allocated; and
/// whatever ends a run early, on any rank.
pub fn run_attention_ranks<M: Machine>(
    machine: &M,
    problem: &RankProblem<'_>,
    config: &RunConfig,
    inputs: Vec<AttentionInputs>,
) -> Result<RanksRun, ExecError> {
    let RankProblem { plan, spec, pass, host_bytes } = *problem;
    let here = machine.ranks_here(plan.ranks.len());
    if inputs.len() != here.len() {
        let reason = format!("are given for {} ranks, of which {} are here", inputs.len(), here.len());
        return Err(ExecError::Tensor { name: "rows".to_owned(), reason });
    }
    for (rank, inputs) in plan.ranks[here.clone()].iter().zip(&inputs) {
        inputs.check((rank.q_rows, rank.k_rows), spec)?;
    }
    let (blocks, reduction) = match config.deterministic {
        true => (KeyBlocks::Aligned, GradientReduction::Deterministic),
        false => (KeyBlocks::Suited, GradientReduction::PerStage),
    };
    let forward: Vec<Program> =
        here.clone().map(|rank| lower_attention_forward(plan, rank, spec, config.policy, blocks)).collect();
    let backward: Vec<Program> = here
        .clone()
        .filter(|_| pass == Pass::ForwardBackward)
        .map(|rank| lower_attention_backward(plan, rank, spec, config.policy, reduction))
        .collect();
    // The two run one after the other; results are gathered while the last one's buffers are alive.
    machine.check_memory(bytes(&forward).max(bytes(&backward)), host_bytes)?;

    let world_config =
        WorldConfig { limit: config.limit, poison: config.poison, faults: config.faults.clone() };
    let world = World::new(plan.ranks.len(), world_config);
    let mut forward = prepare(machine, &world, forward)?;
    let mut local = Vec::with_capacity(forward.len());
    for (prepared, inputs) in forward.iter_mut().zip(inputs) {
        let inputs = LocalInputs::<M>::upload(inputs, prepared.backend())?;
        inputs.bind(prepared)?;
        local.push(inputs);
    }
    let (forward_timeline, forward_seconds) = run_measured(machine, "forward", &mut forward, config)?;
    let (out, lse) = (output(&forward, "out")?, output(&forward, "lse")?);
    let results = download(&forward, "out")?.into_iter().zip(download(&forward, "lse")?);
    let results =
        results.map(|(out, lse)| AttentionOutputs { out, lse, dq: None, dk: None, dv: None, dsink: None });
    let mut run = RanksRun {
        outputs: here.zip(results).collect(),
        forward: forward_timeline,
        backward: None,
        forward_seconds,
        backward_seconds: Vec::new(),
    };
    drop(forward);
    if backward.is_empty() {
        return Ok(run);
    }

    let mut backward = prepare(machine, &world, backward)?;
    for ((prepared, local), (out, lse)) in backward.iter_mut().zip(&local).zip(out.into_iter().zip(lse)) {
        local.bind(prepared)?;
        prepared.bind("out", out)?;
        prepared.bind("lse", lse)?;
    }
    let (timeline, seconds) = run_measured(machine, "backward", &mut backward, config)?;
    (run.backward, run.backward_seconds) = (Some(timeline), seconds);
    for (prepared, (_, outputs)) in backward.iter().zip(&mut run.outputs) {
        let gradient = |name: &str| download(std::slice::from_ref(prepared), name).map(|mut one| one.pop());
        (outputs.dq, outputs.dk, outputs.dv) = (gradient("dq")?, gradient("dk")?, gradient("dv")?);
        if spec.seqlen_sink > 0 {
            outputs.dsink = gradient("dsink")?;
        }
    }
    Ok(run)
}

/// Bytes of all buffers of all ranks.
fn bytes(programs: &[Program]) -> u64 {
    programs.iter().map(|program| program.bytes(|_| true)).fold(0, u64::saturating_add)
}

type Rank<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;
type Buffer<M> = <<M as Machine>::Backend as Backend>::Buffer;

fn prepare<M: Machine>(
    machine: &M,
    world: &Arc<World>,
    programs: Vec<Program>,
) -> Result<Vec<Rank<M>>, ExecError> {
    let ranks = programs.into_iter().zip(machine.connect(world)?);
    ranks.map(|(program, (backend, transport))| Rank::<M>::new(program, backend, transport)).collect()
}

/// The timeline of the last run that takes the times of operations, and the seconds of all that are measured.
fn run_measured<M: Machine>(
    machine: &M,
    pass: &str,
    ranks: &mut [Rank<M>],
    config: &RunConfig,
) -> Result<(Timeline, Vec<f64>), ExecError> {
    let run = |ranks: &mut [Rank<M>]| {
        // Processes have clocks of their own: all begin when the last one is ready.
        machine.meet(pass)?;
        Prepared::run_ranks(ranks)
    };
    let mut timeline = None;
    for _ in 0..config.warmups {
        timeline = Some(run(ranks)?);
    }
    ranks.iter().for_each(|rank| rank.backend().take_times(config.times));
    let mut last = run(ranks)?;
    let mut seconds = vec![last.duration()];
    for _ in 1..config.samples {
        last = run(ranks)?;
        seconds.push(last.duration());
    }
    let timeline = timeline.filter(|_| config.times == RunTimes::Whole);
    Ok((timeline.unwrap_or(last), seconds))
}

/// A rank's rows of the inputs, shared by forward and backward.
struct LocalInputs<M: Machine> {
    tensors: Vec<(&'static str, Buffer<M>)>,
}

impl<M: Machine> LocalInputs<M> {
    fn upload(inputs: AttentionInputs, backend: &M::Backend) -> Result<Self, ExecError> {
        let AttentionInputs { q, k, v, sink, dout } = inputs;
        let all = [("q", Some(q)), ("k", Some(k)), ("v", Some(v)), ("sink", sink), ("dout", dout)];
        let present = all.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
        let upload = |(name, tensor)| Ok::<_, ExecError>((name, backend.upload(name, tensor)?));
        Ok(Self { tensors: present.map(upload).collect::<Result<_, _>>()? })
    }

    /// Binds those that the Program asks for.
    fn bind(&self, prepared: &mut Rank<M>) -> Result<(), ExecError> {
        for (name, buffer) in &self.tensors {
            let wanted = |spec: &BufferSpec| spec.role == BufferRole::Input && spec.name == *name;
            if prepared.program().buffers.iter().any(wanted) {
                prepared.bind(name, buffer.clone())?;
            }
        }
        Ok(())
    }
}

fn output<B: Backend, T: Transport<B>>(
    ranks: &[Prepared<B, T>],
    name: &str,
) -> Result<Vec<B::Buffer>, ExecError> {
    let missing =
        || ExecError::Tensor { name: name.to_owned(), reason: "is no output of the Program".to_owned() };
    ranks.iter().map(|rank| rank.buffer(name).cloned().ok_or_else(missing)).collect()
}

fn download<B: Backend, T: Transport<B>>(
    ranks: &[Prepared<B, T>],
    name: &str,
) -> Result<Vec<HostTensor>, ExecError> {
    let buffers = output(ranks, name)?;
    ranks.iter().zip(&buffers).map(|(rank, buffer)| rank.backend().download(buffer)).collect()
}
