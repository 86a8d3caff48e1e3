//! Distributed attention from tensors to tensors.

mod calls;
mod prepared;
mod process;
mod programs;
mod ranks;
mod step_tables;
mod task;
mod whole;

use std::time::Duration;

use counterpoint_plan::{AttentionSpec, DType, Plan, RankPlan};
use counterpoint_schedule::{PassPolicies, Timeline};

pub use self::calls::{AttentionCalls, AttentionRank, BackwardTensors, ForwardTensors, TablesOfRank};
pub use self::prepared::{PreparedAttention, RankBuffer, rank_outputs};
pub use self::process::run_attention_process;
pub use self::ranks::{RankProblem, RanksRun, run_attention_ranks};
pub use self::step_tables::StepTables;
pub use self::task::AttentionTask;
use crate::layout::dispatch;
use crate::{
    CpuMachine, ExecError, FaultInjection, HostTensor, Machine, Pass, RunTimes, SlowLink, TensorFault,
    WorldConfig,
};

/// Tensors in global token order, or a rank's rows of them; shapes as in [`AttentionSpec`].
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
    /// `[seqlen_q, heads_q]`, accumulator type: the gradient of `lse`, where the spec has one and the backward is asked for.
    pub dlse: Option<HostTensor>,
}

/// Results in global token order, or a rank's rows of them.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutputs {
    /// `[seqlen_q, heads_q, head_dim_v]`
    pub out: HostTensor,
    /// `[seqlen_q, heads_q]`, accumulator type, natural logarithm.
    pub lse: HostTensor,
    /// `[heads_q]`, accumulator type, when the spec asks for it: the largest score of each query head, that the softmax sees (scaled,
    /// capped), over all rows and ranks; a sink's are not among them. `-inf` where there is none. For finite inputs.
    pub max_logits: Option<HostTensor>,
    /// As `q`, when the backward ran; likewise the rest.
    pub dq: Option<HostTensor>,
    /// As `k`.
    pub dk: Option<HostTensor>,
    /// As `v`.
    pub dv: Option<HostTensor>,
    /// As `sink`, when there is one.
    pub dsink: Option<HostTensor>,
}

/// How to run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// How communication is brought to run under computation in each pass: `policy.into()` for one policy.
    pub policy: PassPolicies,
    /// Same bits for any policy and number of stages.
    pub deterministic: bool,
    /// Limits of the ranks, and what tests ask of them.
    pub world: WorldConfig,
    /// Imitate a slow link between CPU ranks, of a machine that the run makes itself.
    pub slow_link: Option<SlowLink>,
    /// How often passes run, and which times are taken.
    pub measurement: Measurement,
}

/// How often each pass runs, and which times are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Runs before those that are measured: the first one on a GPU loads code.
    pub warmups: usize,
    /// Runs that are measured, at least 1. The timeline given is that of the last, as are the results.
    pub samples: usize,
    /// Which times those take. With [`RunTimes::Whole`] the timeline given is that of the last run before them, if there is one:
    /// what users run takes no times, and time stamps of operations hold up others.
    pub times: RunTimes,
}

impl Default for Measurement {
    /// One run, with the times of its operations.
    fn default() -> Self {
        Self { warmups: 0, samples: 1, times: RunTimes::Operations }
    }
}

impl Default for RunConfig {
    /// A rank waits for others as long as they compute, so the limit is longer than a group's.
    fn default() -> Self {
        Self {
            policy: PassPolicies::default(),
            deterministic: false,
            world: WorldConfig { limit: Duration::from_secs(600), ..WorldConfig::default() },
            slow_link: None,
            measurement: Measurement::default(),
        }
    }
}

impl RunConfig {
    /// The same with no wait longer than `limit`.
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.world.limit = limit;
        self
    }

    /// The same whose scratch and output buffers are filled with NaN before each run, or not.
    pub fn with_poison(mut self, poison: bool) -> Self {
        self.world.poison = poison;
        self
    }

    /// The same with these faults injected; a test tool.
    pub fn with_faults(mut self, faults: Vec<FaultInjection>) -> Self {
        self.world.faults = faults;
        self
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
    let machine = CpuMachine::new(config.policy.sm_margin(), config.slow_link)?;
    run_attention_on(&machine, plan, spec, inputs, config)
}

/// Runs distributed attention on the ranks of a machine, all of which are in this process: dispatches the tensors, runs the
/// forward (and, when there is a `dout`, the backward) of every rank, and gathers the results.
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
    let rows = (plan.q_dispatch.seqlen(), plan.k_dispatch.seqlen());
    inputs.check(rows, spec)?;
    let pass = match inputs.dout {
        Some(_) => Pass::ForwardBackward,
        None => Pass::Forward,
    };
    let problem = RankProblem { plan, spec, pass, host_bytes: inputs.bytes() };
    let run = run_attention_ranks(machine, &problem, config, inputs.of_ranks(plan)?)?;
    run.into_whole(plan)
}

impl AttentionInputs {
    /// The rows that each rank of the plan has of every tensor.
    ///
    /// # Errors
    /// As [`AttentionInputs::of_rank`].
    pub fn of_ranks(&self, plan: &Plan) -> Result<Vec<Self>, ExecError> {
        plan.ranks.iter().map(|rank| self.of_rank(rank)).collect()
    }

    /// The rows that a rank has of every tensor.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when the tensors are too short for the plan.
    pub fn of_rank(&self, rank: &RankPlan) -> Result<Self, ExecError> {
        let RankPlan { q_ranges, k_ranges, .. } = rank;
        Ok(Self {
            q: dispatch(&self.q, q_ranges)?,
            k: dispatch(&self.k, k_ranges)?,
            v: dispatch(&self.v, k_ranges)?,
            sink: self.sink.clone(),
            dout: self.dout.as_ref().map(|dout| dispatch(dout, q_ranges)).transpose()?,
            dlse: self.dlse.as_ref().map(|dlse| dispatch(dlse, q_ranges)).transpose()?,
        })
    }

    /// Of all tensors.
    pub fn bytes(&self) -> u64 {
        let Self { q, k, v, sink, dout, dlse } = self;
        let given = [Some(q), Some(k), Some(v), sink.as_ref(), dout.as_ref(), dlse.as_ref()];
        given.into_iter().flatten().map(|tensor| (tensor.len() * tensor.dtype().size()) as u64).sum()
    }

    /// Whether they have so many rows of queries and keys, and the shapes and types of `spec`.
    fn check(&self, (rows_q, rows_k): (usize, usize), spec: &AttentionSpec) -> Result<(), ExecError> {
        let acc = spec.dtype.accumulator();
        check("q", &self.q, spec.dtype, &[rows_q, spec.heads_q, spec.head_dim])?;
        check("k", &self.k, spec.dtype, &[rows_k, spec.heads_kv, spec.head_dim])?;
        check("v", &self.v, spec.dtype, &[rows_k, spec.heads_kv, spec.head_dim_v])?;
        if let Some(dout) = &self.dout {
            check("dout", dout, spec.dtype, &[rows_q, spec.heads_q, spec.head_dim_v])?;
        }
        match &self.dlse {
            Some(dlse) if spec.dlse => check("dlse", dlse, acc, &[rows_q, spec.heads_q])?,
            Some(_) => {
                let unused = "the spec has none".to_owned();
                return Err(ExecError::tensor("dlse", TensorFault::Unused { unused }));
            }
            None if spec.dlse && self.dout.is_some() => {
                let wanted = "the spec has one".to_owned();
                return Err(ExecError::tensor("dlse", TensorFault::MissingFor { wanted }));
            }
            None => {}
        }
        match &self.sink {
            Some(sink) => check("sink", sink, acc, &[spec.seqlen_sink, spec.heads_q]),
            None if spec.seqlen_sink > 0 => {
                let wanted = format!("the spec has {} rows of it", spec.seqlen_sink);
                Err(ExecError::tensor("sink", TensorFault::MissingFor { wanted }))
            }
            None => Ok(()),
        }
    }
}

fn check(name: &str, tensor: &HostTensor, dtype: DType, shape: &[usize]) -> Result<(), ExecError> {
    TensorFault::of_layout((dtype, shape), (tensor.dtype(), tensor.shape()))
        .map_or(Ok(()), |fault| Err(ExecError::tensor(name, fault)))
}
