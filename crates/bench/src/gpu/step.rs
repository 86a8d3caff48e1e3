//! Whole steps of distributed attention by the host's clock, enqueued or as CUDA graphs: for `bench cp --step` and the selftest.

use std::time::{Duration, Instant};

use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, ExecError, Pass, PreparedAttention, PreparedRank, RankProblem,
    RanksRun, RunConfig, rank_outputs,
};
use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{BufferRole, GradientReduction, PassPolicies};

use counterpoint_cuda::PassOrder;
use counterpoint_cuda::{CudaMachine, GraphRun};

/// A step of distributed attention, a forward and a backward of all ranks of this process, enqueued by one thread without waiting in
/// between: operation by operation, or as one CUDA graph.
pub struct StepBench {
    plan: Plan,
    prepared: PreparedAttention<CudaMachine>,
}

type Rank = PreparedRank<CudaMachine>;

/// Limit of every wait.
const LIMIT: Duration = Duration::from_secs(30);
/// Steps of one time.
const CALLS: usize = 20;
const WARM_UPS: usize = 2;

impl StepBench {
    /// Puts the inputs on the GPUs, `dout` among them, and runs a step once.
    ///
    /// # Errors
    /// When they do not fit, or the run fails.
    pub fn new(
        machine: &CudaMachine,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        policies: impl Into<PassPolicies>,
        reduction: GradientReduction,
    ) -> Result<Self, ExecError> {
        let config = RunConfig {
            policy: policies.into(),
            deterministic: reduction == GradientReduction::Deterministic,
            ..RunConfig::default()
        }
        .with_limit(LIMIT)
        .with_poison(false);
        let problem = RankProblem { plan, spec, pass: Pass::ForwardBackward, host_bytes: 0 };
        let mut prepared = PreparedAttention::new(machine, &problem, &config, inputs.of_ranks(plan)?)?;
        prepared.forward(machine)?;
        prepared.backward(machine)?;
        Ok(Self { plan: plan.clone(), prepared })
    }

    /// What the last step has written, in global token order.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn outputs(&self) -> Result<AttentionOutputs, ExecError> {
        whole(&self.plan, self.prepared.outputs()?)
    }

    /// Seconds of a step by the host's clock, `iterations` times, each over many steps enqueued one behind the other.
    ///
    /// # Errors
    /// When a step fails.
    pub fn enqueued(&mut self, iterations: usize) -> Result<Vec<f64>, ExecError> {
        let mut passes = self.prepared.passes();
        let order = PassOrder::new(&passes)?;
        timed(iterations, || {
            (0..CALLS).try_for_each(|_| order.enqueue(&mut passes))?;
            let mut ranks = passes.iter_mut().flat_map(|ranks| ranks.iter_mut());
            ranks.try_for_each(|rank| rank.finish().map(drop))
        })
    }

    /// Likewise, each step replayed as a CUDA graph.
    ///
    /// # Errors
    /// When the step cannot be captured, or a replay fails.
    pub fn replayed(&mut self, iterations: usize) -> Result<Vec<f64>, ExecError> {
        let mut graph = GraphRun::capture_passes(self.prepared.passes().into())?;
        timed(iterations, || {
            (0..CALLS).try_for_each(|_| graph.start())?;
            graph.finish()
        })
    }

    /// How many of so many replays, each over poisoned outputs, gave other bits than the step that was enqueued.
    ///
    /// # Errors
    /// As [`StepBench::replayed`].
    pub fn unlike_replays(&mut self, replays: usize) -> Result<usize, ExecError> {
        let direct = self.outputs()?;
        let mut graph = GraphRun::capture_passes(self.prepared.passes().into())?;
        let mut unlike = 0;
        for _ in 0..replays {
            graph.passes().iter().flat_map(|ranks| ranks.iter()).try_for_each(poison)?;
            graph.start()?;
            graph.finish()?;
            let passes = graph.passes();
            let outputs = rank_outputs(0..passes[0].len(), [&*passes[0], &*passes[1]])?;
            unlike += usize::from(whole(&self.plan, outputs)? != direct);
        }
        Ok(unlike)
    }
}

fn timed(iterations: usize, mut calls: impl FnMut() -> Result<(), ExecError>) -> Result<Vec<f64>, ExecError> {
    let mut seconds = Vec::with_capacity(iterations);
    for iteration in 0..WARM_UPS + iterations {
        let began = Instant::now();
        calls()?;
        if iteration >= WARM_UPS {
            seconds.push(began.elapsed().as_secs_f64() / CALLS as f64);
        }
    }
    Ok(seconds)
}

fn names(rank: &Rank, role: BufferRole) -> Vec<String> {
    let buffers = rank.program().buffers.iter().filter(|buffer| buffer.role == role);
    buffers.map(|buffer| buffer.name.clone()).collect()
}

/// NaN in every element of a rank's outputs.
fn poison(rank: &Rank) -> Result<(), ExecError> {
    let setup = rank.backend().setup();
    for name in names(rank, BufferRole::Output) {
        let Some(buffer) = rank.buffer(&name) else { continue };
        let filled = buffer.memory().fill(setup, 0xff);
        filled.map_err(|error| rank.backend().error(&"poisoning", error))?;
    }
    setup.synchronize().map_err(|error| rank.backend().error(&"poisoning", error))
}

fn whole(plan: &Plan, outputs: Vec<(usize, AttentionOutputs)>) -> Result<AttentionOutputs, ExecError> {
    Ok(RanksRun::of_outputs(outputs).into_whole(plan)?.outputs)
}
