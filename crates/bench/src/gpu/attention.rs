//! Timing on one GPU: attention by prepared Programs, inputs in place, by the device's clock or the host's; and matrix products.
//! Steps of distributed attention on several.

use std::sync::Arc;
use std::time::{Duration, Instant};

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, Backend, ExecError, HostTensor, Machine, Prepared, ProgramFault,
    TensorFault, World, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{
    BufferRole, GradientReduction, KeyBlocks, OverlapPolicy, Program, lower_attention_backward,
    lower_attention_forward,
};

use counterpoint_cuda::{
    CudaBackend, CudaBuffer, CudaError, CudaMachine, CudaTransport, DeviceBuffer, Event, GraphRun,
};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchPass {
    /// From q, k, v to out and lse.
    Forward,
    /// From those and dout to dq, dk, dv, the row statistic included.
    Backward,
    /// The same in an order of sums that is always the same.
    Deterministic,
}

impl std::fmt::Display for BenchPass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Deterministic => "deterministic backward",
        })
    }
}

/// What time is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchClock {
    /// The device's, around everything that a pass enqueues; the level 2 cache is flushed and the launches are queued before
    /// the first kernel starts.
    Device,
    /// The host's, over [`CALLS`] runs enqueued one after the other and awaited together, over their number.
    Wall,
    /// The same, each run replayed as a CUDA graph.
    Graph,
}

/// Runs of one time under [`BenchClock::Wall`].
pub const CALLS: usize = 40;

/// Bytes that are written to flush the level 2 cache: several times the largest there is.
const FLUSH_BYTES: usize = 256 << 20;
/// How often they are written, so that the device is busy until all launches are queued.
const FLUSHES: usize = 4;

/// One problem's tensors on a GPU, to be timed under many masks.
pub struct AttentionBench {
    machine: CudaMachine,
    world: Arc<World>,
    spec: AttentionSpec,
    inputs: Vec<(&'static str, CudaBuffer)>,
    flush: DeviceBuffer,
    begin: Event,
    end: Event,
}

/// The passes under one mask, prepared.
pub struct BenchCase<'a> {
    bench: &'a AttentionBench,
    plan: Plan,
    passes: Vec<(BenchPass, Rank)>,
}

type Rank = Prepared<CudaBackend, CudaTransport>;

impl AttentionBench {
    /// Puts the inputs on the first GPU.
    ///
    /// # Errors
    /// When they do not fit, or the driver refuses.
    pub fn new(
        machine: &CudaMachine,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
    ) -> Result<Self, ExecError> {
        let config = WorldConfig { limit: Duration::from_secs(60), poison: false, ..WorldConfig::default() };
        let world = World::new(1, config);
        let (backend, _) = only(machine, &world)?;
        let failed = |error| backend.error(&"the preparation of a benchmark", error);
        let named = [
            ("q", Some(&inputs.q)),
            ("k", Some(&inputs.k)),
            ("v", Some(&inputs.v)),
            ("sink", inputs.sink.as_ref()),
            ("dout", inputs.dout.as_ref()),
        ];
        let mut uploaded = Vec::new();
        for (name, tensor) in named {
            if let Some(tensor) = tensor {
                uploaded.push((name, backend.upload(name, tensor.clone())?));
            }
        }
        let device = backend.device();
        Ok(Self {
            machine: machine.clone(),
            spec: *spec,
            inputs: uploaded,
            flush: DeviceBuffer::new(device, FLUSH_BYTES).map_err(failed)?,
            begin: Event::timing(device).map_err(failed)?,
            end: Event::timing(device).map_err(failed)?,
            world,
        })
    }

    /// Prepares the forward under a mask, and runs it once over poisoned outputs.
    ///
    /// # Errors
    /// When a mask or a kernel does not fit, or the run fails.
    pub fn case(&self, mask: &Mask) -> Result<BenchCase<'_>, ExecError> {
        let plan = plan_mask(mask, &self.spec, &PlanConfig::new(1)).map_err(|error| ExecError::Program {
            program: "attention".to_owned(),
            rank: 0,
            reason: ProgramFault::NotPlanned { reason: error.to_string() },
        })?;
        let mut case = BenchCase { bench: self, plan, passes: Vec::new() };
        let program = lower_attention_forward(&case.plan, 0, &self.spec, POLICY, KeyBlocks::Unaligned);
        case.add(BenchPass::Forward, program)?;
        Ok(case)
    }
}

/// One stream: on one rank there is nothing to overlap.
const POLICY: OverlapPolicy = OverlapPolicy::SEQUENTIAL;

impl BenchCase<'_> {
    /// Prepares a pass after the forward, and runs it once over poisoned outputs. It reads what the forward has written.
    ///
    /// # Errors
    /// As [`AttentionBench::case`].
    pub fn prepare(&mut self, pass: BenchPass) -> Result<(), ExecError> {
        let reduction = match pass {
            BenchPass::Forward => return Ok(()),
            BenchPass::Backward => GradientReduction::PerStage,
            BenchPass::Deterministic => GradientReduction::Deterministic,
        };
        let program = lower_attention_backward(&self.plan, 0, &self.bench.spec, POLICY, reduction);
        self.add(pass, program)
    }

    fn add(&mut self, pass: BenchPass, program: Program) -> Result<(), ExecError> {
        let (backend, transport) = only(&self.bench.machine, &self.bench.world)?;
        let names = |role| {
            let buffers = program.buffers.iter().filter(move |buffer| buffer.role == role);
            buffers.map(|buffer| buffer.name.clone()).collect::<Vec<_>>()
        };
        let (wanted, written) = (names(BufferRole::Input), names(BufferRole::Output));
        let mut rank = Prepared::new(program, backend, transport)?;
        for name in &wanted {
            let given = self.bench.inputs.iter().find(|(given, _)| given == name);
            let buffer = given.map(|(_, buffer)| buffer).or_else(|| self.passes[0].1.buffer(name)).cloned();
            if let Some(buffer) = buffer {
                rank.bind(name, buffer)?;
            }
        }
        for buffer in written.iter().filter_map(|name| rank.buffer(name)) {
            let setup = rank.backend().setup();
            let poisoned = buffer.memory().fill(setup, 0xff).and_then(|()| setup.synchronize());
            poisoned.map_err(|error| rank.backend().error(&"poisoning", error))?;
        }
        rank.start(Instant::now())?;
        rank.finish()?;
        self.passes.push((pass, rank));
        Ok(())
    }

    fn rank(&self, pass: BenchPass) -> Option<&Rank> {
        self.passes.iter().find(|(other, _)| *other == pass).map(|(_, rank)| rank)
    }

    /// What the forward and a backward pass, where it was prepared, have written.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn outputs(&self, pass: BenchPass) -> Result<AttentionOutputs, ExecError> {
        let download = |pass: BenchPass, name: &str| -> Result<Option<HostTensor>, ExecError> {
            let Some(rank) = self.rank(pass) else { return Ok(None) };
            rank.buffer(name).map(|buffer| rank.backend().download(buffer)).transpose()
        };
        let forward = |name: &str| {
            let missing = || ExecError::tensor(name, TensorFault::NotComputed);
            download(BenchPass::Forward, name)?.ok_or_else(missing)
        };
        let backward = |name: &str| match pass {
            BenchPass::Forward => Ok(None),
            pass => download(pass, name),
        };
        Ok(AttentionOutputs {
            out: forward("out")?,
            lse: forward("lse")?,
            max_logits: None,
            dq: backward("dq")?,
            dk: backward("dk")?,
            dv: backward("dv")?,
            dsink: backward("dsink")?,
        })
    }

    /// Seconds of `iterations` runs of a pass, after a few that do not count.
    ///
    /// # Errors
    /// When the pass was not prepared or a run fails.
    pub fn seconds(
        &mut self,
        pass: BenchPass,
        clock: BenchClock,
        iterations: usize,
    ) -> Result<Vec<f64>, ExecError> {
        const WARM_UP: usize = 3;
        let bench = self.bench;
        let Some((_, rank)) = self.passes.iter_mut().find(|(other, _)| *other == pass) else {
            let reason = ProgramFault::NotPrepared { pass: pass.to_string() };
            return Err(ExecError::Program { program: "attention".to_owned(), rank: 0, reason });
        };
        let mut seconds = Vec::with_capacity(iterations);
        let mut timed = |once: &mut dyn FnMut() -> Result<f64, ExecError>| -> Result<(), ExecError> {
            for iteration in 0..WARM_UP + iterations {
                let took = once()?;
                if iteration >= WARM_UP {
                    seconds.push(took);
                }
            }
            Ok(())
        };
        match clock {
            BenchClock::Device => timed(&mut || bench.on_device(rank))?,
            BenchClock::Wall => timed(&mut || {
                let began = Instant::now();
                (0..CALLS).try_for_each(|_| rank.start(Instant::now()))?;
                rank.finish()?;
                Ok(began.elapsed().as_secs_f64() / CALLS as f64)
            })?,
            BenchClock::Graph => {
                let mut graph = GraphRun::capture(rank)?;
                timed(&mut || {
                    let began = Instant::now();
                    (0..CALLS).try_for_each(|_| graph.start())?;
                    graph.finish()?;
                    Ok(began.elapsed().as_secs_f64() / CALLS as f64)
                })?;
            }
        }
        Ok(seconds)
    }
}

impl AttentionBench {
    /// One run between two events.
    fn on_device(&self, rank: &mut Rank) -> Result<f64, ExecError> {
        let backend = rank.backend().clone();
        let failed = |error: CudaError| backend.error(&"the timing of a run", error);
        // Programs of one rank and one stage are on one stream.
        let stream = rank.streams()[0].queue().clone();
        (0..FLUSHES).try_for_each(|_| self.flush.fill(&stream, 0)).map_err(failed)?;
        self.begin.record(&stream).map_err(failed)?;
        rank.start(Instant::now())?;
        self.end.record(&stream).map_err(failed)?;
        rank.finish()?;
        Ok(self.end.time_since(&self.begin).map_err(failed)?.as_secs_f64())
    }
}

/// Backend and transport of a world of one rank.
fn only(machine: &CudaMachine, world: &Arc<World>) -> Result<(CudaBackend, CudaTransport), ExecError> {
    let none =
        || ExecError::Program { program: "attention".to_owned(), rank: 0, reason: ProgramFault::NoRank };
    machine.connect(world)?.pop().ok_or_else(none)
}
