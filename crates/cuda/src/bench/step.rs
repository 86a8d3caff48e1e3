use std::time::{Duration, Instant};

use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, Backend, ExecError, HostTensor, Machine, Prepared, RanksRun, World,
    WorldConfig,
};
use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{
    BufferRole, GradientReduction, KeyBlocks, OverlapPolicy, Program, Timeline, lower_attention_backward,
    lower_attention_forward,
};

use crate::backend::PassOrder;
use crate::{CudaBackend, CudaMachine, CudaTransport, GraphRun};

/// A step of distributed attention, a forward and a backward of all ranks of this process, enqueued by one thread without waiting in
/// between: operation by operation, or as one CUDA graph.
pub struct StepBench {
    plan: Plan,
    passes: [Vec<Rank>; 2],
}

type Rank = Prepared<CudaBackend, CudaTransport>;

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
        policy: OverlapPolicy,
        reduction: GradientReduction,
    ) -> Result<Self, ExecError> {
        let config = WorldConfig { limit: LIMIT, poison: false, ..WorldConfig::default() };
        let world = World::new(plan.cp_size(), config);
        let prepare = |program: &dyn Fn(usize) -> Program| -> Result<Vec<Rank>, ExecError> {
            let ends = machine.connect(&world)?.into_iter().enumerate();
            ends.map(|(rank, (backend, transport))| Prepared::new(program(rank), backend, transport))
                .collect()
        };
        let blocks = match reduction {
            GradientReduction::PerStage => KeyBlocks::Suited,
            GradientReduction::Deterministic => KeyBlocks::Aligned,
        };
        let mut forward = prepare(&|rank| lower_attention_forward(plan, rank, spec, policy, blocks))?;
        let mut backward = prepare(&|rank| lower_attention_backward(plan, rank, spec, policy, reduction))?;
        for (rank, (first, second)) in plan.ranks.iter().zip(forward.iter_mut().zip(&mut backward)) {
            let AttentionInputs { q, k, v, sink, dout } = inputs.of_rank(rank)?;
            let named = [("q", Some(q)), ("k", Some(k)), ("v", Some(v)), ("sink", sink), ("dout", dout)];
            for (name, tensor) in named {
                let Some(tensor) = tensor else { continue };
                let buffer = first.backend().upload(name, tensor)?;
                for pass in [&mut *first, &mut *second] {
                    if names(pass, BufferRole::Input).iter().any(|wanted| wanted == name) {
                        pass.bind(name, buffer.clone())?;
                    }
                }
            }
            for name in ["out", "lse"] {
                if let Some(buffer) = first.buffer(name) {
                    second.bind(name, buffer.clone())?;
                }
            }
        }
        Prepared::run_ranks(&mut forward)?;
        Prepared::run_ranks(&mut backward)?;
        Ok(Self { plan: plan.clone(), passes: [forward, backward] })
    }

    /// What the last step has written, in global token order.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn outputs(&self) -> Result<AttentionOutputs, ExecError> {
        let [forward, backward] = &self.passes;
        outputs(&self.plan, forward, backward)
    }

    /// Seconds of a step by the host's clock, `iterations` times, each over many steps enqueued one behind the other.
    ///
    /// # Errors
    /// When a step fails.
    pub fn enqueued(&mut self, iterations: usize) -> Result<Vec<f64>, ExecError> {
        let mut passes = self.passes.each_mut().map(|ranks| &mut ranks[..]);
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
        let mut graph = GraphRun::capture_passes(self.passes.each_mut().map(|ranks| &mut ranks[..]).into())?;
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
        let mut graph = GraphRun::capture_passes(self.passes.each_mut().map(|ranks| &mut ranks[..]).into())?;
        let mut unlike = 0;
        for _ in 0..replays {
            graph.passes().iter().flat_map(|ranks| ranks.iter()).try_for_each(poison)?;
            graph.start()?;
            graph.finish()?;
            let passes = graph.passes();
            unlike += usize::from(outputs(&self.plan, passes[0], passes[1])? != direct);
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

fn outputs(plan: &Plan, forward: &[Rank], backward: &[Rank]) -> Result<AttentionOutputs, ExecError> {
    let download = |rank: &Rank, name: &str| -> Result<Option<HostTensor>, ExecError> {
        rank.buffer(name).map(|buffer| rank.backend().download(buffer)).transpose()
    };
    let present = |rank: &Rank, name: &str| {
        let missing = || ExecError::Tensor { name: name.to_owned(), reason: "was not computed".to_owned() };
        download(rank, name)?.ok_or_else(missing)
    };
    let of_rank = |(at, (first, second)): (usize, (&Rank, &Rank))| -> Result<_, ExecError> {
        let outputs = AttentionOutputs {
            out: present(first, "out")?,
            lse: present(first, "lse")?,
            dq: download(second, "dq")?,
            dk: download(second, "dk")?,
            dv: download(second, "dv")?,
            dsink: download(second, "dsink")?,
        };
        Ok((at, outputs))
    };
    let all = forward.iter().zip(backward).enumerate().map(of_rank).collect::<Result<_, _>>()?;
    let run = RanksRun {
        outputs: all,
        forward: Timeline::default(),
        backward: None,
        forward_seconds: Vec::new(),
        backward_seconds: Vec::new(),
    };
    Ok(run.into_whole(plan)?.outputs)
}
