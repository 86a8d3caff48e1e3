use std::sync::Arc;
use std::time::Duration;

use counterpoint_plan::{AttentionSpec, DType, Dispatch, Plan, RankPlan};
use counterpoint_schedule::{
    BufferRole, BufferSpec, GradientReduction, OverlapPolicy, Program, Timeline, lower_attention_backward,
    lower_attention_forward,
};

use crate::layout::{dispatch, undispatch};
use crate::{
    Backend, CpuMachine, ExecError, FaultInjection, HostTensor, Machine, Prepared, Transport, World,
    WorldConfig,
};

/// Tensors in global token order, shapes as in [`AttentionSpec`].
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionInputs {
    /// `[seqlen_q, heads_q, head_dim]`
    pub q: HostTensor,
    /// `[seqlen_k, heads_kv, head_dim]`
    pub k: HostTensor,
    /// `[seqlen_k, heads_kv, head_dim_v]`
    pub v: HostTensor,
    /// `[seqlen_sink, heads_q]`, accumulator type.
    pub sink: Option<HostTensor>,
    /// `[seqlen_q, heads_q, head_dim_v]`; its presence asks for the backward.
    pub dout: Option<HostTensor>,
}

/// Results in global token order.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutputs {
    /// `[seqlen_q, heads_q, head_dim_v]`
    pub out: HostTensor,
    /// `[seqlen_q, heads_q]`, accumulator type, natural logarithm.
    pub lse: HostTensor,
    /// As `q`, when the backward ran; likewise the rest.
    pub dq: Option<HostTensor>,
    /// As `k`.
    pub dk: Option<HostTensor>,
    /// As `v`.
    pub dv: Option<HostTensor>,
    /// As `sink`, when there is one.
    pub dsink: Option<HostTensor>,
}

/// A link that the local transport is told to imitate: a group collective in which a rank exchanges rows with others takes
/// at least `alpha + bytes / bytes_per_second` on that rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowLink {
    /// Added to every collective.
    pub alpha: Duration,
    /// Bytes a second of a rank, the larger of what it sends and what it receives.
    pub bytes_per_second: f64,
}

/// How to run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
    /// Same bits for any policy and number of stages.
    pub deterministic: bool,
    /// Limit of every wait. A rank waits for others as long as they compute, so it must be above the longest single
    /// computation.
    pub limit: Duration,
    /// Fill scratch and output buffers with NaN before each run, so that an element that nobody wrote shows. On by default
    /// where debug assertions are.
    pub poison: bool,
    /// Imitate a slow link.
    pub slow_link: Option<SlowLink>,
    /// Runs of each pass before those that are measured: the first one on a GPU loads code.
    pub warmups: usize,
    /// Runs of each pass that are measured, at least 1. The timeline given is that of the last, as are the results.
    pub samples: usize,
    /// Faults to inject; a test tool.
    pub faults: Vec<FaultInjection>,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            policy: OverlapPolicy::default(),
            deterministic: false,
            limit: Duration::from_secs(600),
            poison: cfg!(debug_assertions),
            slow_link: None,
            warmups: 0,
            samples: 1,
            faults: Vec::new(),
        }
    }
}

/// What a run gave.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionRun {
    /// Results in global token order.
    pub outputs: AttentionOutputs,
    /// Measured forward.
    pub forward: Timeline,
    /// Measured backward.
    pub backward: Option<Timeline>,
    /// Seconds of every measured forward: from the start of the first operation of any rank to the end of the last.
    pub forward_seconds: Vec<f64>,
    /// Likewise of the backward; empty without one.
    pub backward_seconds: Vec<f64>,
}

/// Runs distributed attention on CPU ranks, which are threads of this process: [`run_attention_on`] a [`CpuMachine`].
///
/// # Errors
/// As [`run_attention_on`]. There is no partial result: a rank that panics or stalls makes the call return its error within
/// the limit, at the price of that rank's threads, which end when they can.
pub fn run_attention(
    plan: &Plan,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    config: &RunConfig,
) -> Result<AttentionRun, ExecError> {
    let machine = CpuMachine::new(config.policy.sm_margin, config.slow_link)?;
    run_attention_on(&machine, plan, spec, inputs, config)
}

/// Runs distributed attention on the ranks of a machine: dispatches the tensors, runs the forward (and, when there is a
/// `dout`, the backward) of every rank, and gathers the results.
///
/// # Errors
/// [`ExecError::Tensor`] when a tensor does not fit the plan; [`ExecError::OutOfMemory`], before anything is allocated; and
/// whatever ends a run early.
pub fn run_attention_on<M: Machine>(
    machine: &M,
    plan: &Plan,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    config: &RunConfig,
) -> Result<AttentionRun, ExecError> {
    check_inputs(plan, spec, inputs)?;
    let ranks = 0..plan.ranks.len();
    let forward: Vec<Program> =
        ranks.clone().map(|rank| lower_attention_forward(plan, rank, spec, config.policy)).collect();
    let reduction =
        if config.deterministic { GradientReduction::Deterministic } else { GradientReduction::PerStage };
    let backward: Vec<Program> = ranks
        .filter(|_| inputs.dout.is_some())
        .map(|rank| lower_attention_backward(plan, rank, spec, config.policy, reduction))
        .collect();
    // The two run one after the other; results are gathered while the last one's buffers are alive.
    machine.check_memory(bytes(&forward).max(bytes(&backward)), inputs.bytes())?;

    let world_config =
        WorldConfig { limit: config.limit, poison: config.poison, faults: config.faults.clone() };
    let world = World::new(plan.ranks.len(), world_config);
    let mut forward = prepare(machine, &world, forward)?;
    let local = LocalInputs::<M>::dispatch(plan, inputs, &forward)?;
    for (rank, prepared) in forward.iter_mut().enumerate() {
        local.bind(rank, prepared)?;
    }
    let (forward_timeline, forward_seconds) = run_measured(&mut forward, config)?;
    let out = output(&forward, "out")?;
    let lse = output(&forward, "lse")?;
    let mut run = AttentionRun {
        outputs: AttentionOutputs {
            out: undispatch(&plan.q_dispatch, &download(&forward, "out")?)?,
            lse: undispatch(&plan.q_dispatch, &download(&forward, "lse")?)?,
            dq: None,
            dk: None,
            dv: None,
            dsink: None,
        },
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
    for (rank, (prepared, (out, lse))) in backward.iter_mut().zip(out.into_iter().zip(lse)).enumerate() {
        local.bind(rank, prepared)?;
        prepared.bind("out", out)?;
        prepared.bind("lse", lse)?;
    }
    let (timeline, seconds) = run_measured(&mut backward, config)?;
    (run.backward, run.backward_seconds) = (Some(timeline), seconds);
    let gradient = |name: &str, dispatch: &Dispatch| -> Result<Option<HostTensor>, ExecError> {
        undispatch(dispatch, &download(&backward, name)?).map(Some)
    };
    run.outputs.dq = gradient("dq", &plan.q_dispatch)?;
    run.outputs.dk = gradient("dk", &plan.k_dispatch)?;
    run.outputs.dv = gradient("dv", &plan.k_dispatch)?;
    if inputs.sink.is_some() {
        // Summed over all ranks already, so that every rank has it.
        run.outputs.dsink = download(&backward[..1], "dsink")?.pop();
    }
    Ok(run)
}

impl AttentionInputs {
    fn bytes(&self) -> u64 {
        let tensors = [Some(&self.q), Some(&self.k), Some(&self.v), self.sink.as_ref(), self.dout.as_ref()];
        tensors.into_iter().flatten().map(|tensor| (tensor.len() * tensor.dtype().size()) as u64).sum()
    }
}

fn check_inputs(plan: &Plan, spec: &AttentionSpec, inputs: &AttentionInputs) -> Result<(), ExecError> {
    let (rows_q, rows_k) = (plan.q_dispatch.seqlen(), plan.k_dispatch.seqlen());
    let acc = spec.dtype.accumulator();
    check("q", &inputs.q, spec.dtype, &[rows_q, spec.heads_q, spec.head_dim])?;
    check("k", &inputs.k, spec.dtype, &[rows_k, spec.heads_kv, spec.head_dim])?;
    check("v", &inputs.v, spec.dtype, &[rows_k, spec.heads_kv, spec.head_dim_v])?;
    if let Some(dout) = &inputs.dout {
        check("dout", dout, spec.dtype, &[rows_q, spec.heads_q, spec.head_dim_v])?;
    }
    match &inputs.sink {
        Some(sink) => check("sink", sink, acc, &[spec.seqlen_sink, spec.heads_q]),
        None if spec.seqlen_sink > 0 => Err(ExecError::Tensor {
            name: "sink".to_owned(),
            reason: format!("is missing, and the spec has {} rows of it", spec.seqlen_sink),
        }),
        None => Ok(()),
    }
}

fn check(name: &str, tensor: &HostTensor, dtype: DType, shape: &[usize]) -> Result<(), ExecError> {
    if tensor.dtype() == dtype && tensor.shape() == shape {
        return Ok(());
    }
    let reason = format!("must be {dtype:?} {shape:?}, not {:?} {:?}", tensor.dtype(), tensor.shape());
    Err(ExecError::Tensor { name: name.to_owned(), reason })
}

/// Bytes of all buffers of all ranks.
fn bytes(programs: &[Program]) -> u64 {
    programs.iter().flat_map(|program| &program.buffers).map(BufferSpec::bytes).fold(0, u64::saturating_add)
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

/// The timeline of the last run, and the seconds of all that are measured.
fn run_measured<B: Backend, T: Transport<B>>(
    ranks: &mut [Prepared<B, T>],
    config: &RunConfig,
) -> Result<(Timeline, Vec<f64>), ExecError> {
    (0..config.warmups).try_for_each(|_| Prepared::run_ranks(ranks).map(|_| ()))?;
    let mut timeline = Prepared::run_ranks(ranks)?;
    let mut seconds = vec![timeline.duration()];
    for _ in 1..config.samples {
        timeline = Prepared::run_ranks(ranks)?;
        seconds.push(timeline.duration());
    }
    Ok((timeline, seconds))
}

/// Every rank's rows of the inputs, shared by forward and backward.
struct LocalInputs<M: Machine> {
    tensors: Vec<Vec<(&'static str, Buffer<M>)>>,
}

impl<M: Machine> LocalInputs<M> {
    fn dispatch(plan: &Plan, inputs: &AttentionInputs, ranks: &[Rank<M>]) -> Result<Self, ExecError> {
        let local = |(rank, prepared): (&RankPlan, &Rank<M>)| {
            let mut local = Vec::new();
            let mut add = |name: &'static str, tensor: HostTensor| -> Result<(), ExecError> {
                local.push((name, prepared.backend().upload(name, tensor)?));
                Ok(())
            };
            add("q", dispatch(&inputs.q, &rank.q_ranges)?)?;
            add("k", dispatch(&inputs.k, &rank.k_ranges)?)?;
            add("v", dispatch(&inputs.v, &rank.k_ranges)?)?;
            if let Some(sink) = &inputs.sink {
                add("sink", sink.clone())?;
            }
            if let Some(dout) = &inputs.dout {
                add("dout", dispatch(dout, &rank.q_ranges)?)?;
            }
            Ok(local)
        };
        Ok(Self { tensors: plan.ranks.iter().zip(ranks).map(local).collect::<Result<_, _>>()? })
    }

    /// Binds those that the Program asks for.
    fn bind(&self, rank: usize, prepared: &mut Rank<M>) -> Result<(), ExecError> {
        for (name, buffer) in &self.tensors[rank] {
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
