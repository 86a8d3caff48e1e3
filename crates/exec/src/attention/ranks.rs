//! Attention of the ranks of one process, run and measured once.

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::Timeline;

use super::prepared::{ForwardResults, Setup, add_gradients, bytes, forward_outputs, run_once};
use super::{AttentionInputs, AttentionOutputs, Measurement, RunConfig};
use crate::{ExecError, Machine, Pass, PreparedRank, RunTimes};

/// What ranks are to compute.
#[derive(Clone, Copy, Debug)]
pub struct RankProblem<'a> {
    /// Of all ranks.
    pub plan: &'a Plan,
    /// The tensors.
    pub spec: &'a AttentionSpec,
    /// How much of it.
    pub pass: Pass,
    /// Bytes of tensors that the caller holds besides the ranks' own.
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

impl RanksRun {
    /// Those results, of runs whose times nobody took.
    pub fn of_outputs(outputs: Vec<(usize, AttentionOutputs)>) -> Self {
        Self {
            outputs,
            forward: Timeline::default(),
            backward: None,
            forward_seconds: Vec::new(),
            backward_seconds: Vec::new(),
        }
    }
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
    let mut setup = Setup::new(machine, problem, config, &inputs)?;
    // The two run one after the other; results are gathered while the last one's buffers are alive.
    let most = bytes(&setup.forward).max(bytes(&setup.backward));
    machine.check_memory(most, problem.host_bytes)?;

    let (mut forward, local) = setup.prepare_forward(inputs)?;
    let (forward_timeline, forward_seconds) = run_measured(machine, "forward", &mut forward, config)?;
    let results = ForwardResults::of(&forward)?;
    let outputs = forward_outputs(setup.here.clone(), &forward)?;
    let mut run = RanksRun { forward: forward_timeline, forward_seconds, ..RanksRun::of_outputs(outputs) };
    drop(forward);
    if setup.backward.is_empty() {
        return Ok(run);
    }

    let mut backward = setup.prepare_backward(&local, results)?;
    let (timeline, seconds) = run_measured(machine, "backward", &mut backward, config)?;
    (run.backward, run.backward_seconds) = (Some(timeline), seconds);
    add_gradients(&backward, &mut run.outputs)?;
    Ok(run)
}

/// The timeline of the last run that takes the times of operations, and the seconds of all that are measured.
fn run_measured<M: Machine>(
    machine: &M,
    pass: &str,
    ranks: &mut [PreparedRank<M>],
    config: &RunConfig,
) -> Result<(Timeline, Vec<f64>), ExecError> {
    let run = |ranks: &mut [PreparedRank<M>]| run_once(machine, pass, ranks);
    let Measurement { warmups, samples, times } = config.measurement;
    let mut timeline = None;
    for _ in 0..warmups {
        timeline = Some(run(ranks)?);
    }
    ranks.iter_mut().for_each(|rank| rank.set_timing(times));
    let mut last = run(ranks)?;
    let mut seconds = vec![last.duration()];
    for _ in 1..samples {
        last = run(ranks)?;
        seconds.push(last.duration());
    }
    let timeline = timeline.filter(|_| times == RunTimes::Whole);
    Ok((timeline.unwrap_or(last), seconds))
}
