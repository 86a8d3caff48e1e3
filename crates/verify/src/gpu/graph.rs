//! Checks of CUDA graphs: captured Programs and whole steps replay with the bits of the direct run.

use std::time::Duration;

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_exec::{
    Backend, ExecError, HostTensor, Machine, Pass, Prepared, ProgramFault, World, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_plan::DType;
use counterpoint_reference::selftest::{Case, Extent, SelfCheck, unlike_elements};
use counterpoint_schedule::{
    BufferRole, GradientReduction, KeyBlocks, OverlapPolicy, Program, lower_attention_backward,
    lower_attention_forward,
};

use super::staged::StagedAttention;
use counterpoint_bench::gpu::StepBench;
use counterpoint_cuda::{CudaBackend, CudaBuffer, CudaMachine, CudaTransport, GraphRun};

/// Whole Programs captured as CUDA graphs and replayed twice over poisoned outputs, the backward the second time after a replay over NaN:
/// the bits must be those of the direct run.
/// `checked` hears of every check, with how many there are.
pub fn selftest_graphs(
    machine: &CudaMachine,
    extent: Extent,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Vec<SelfCheck> {
    let count = match extent {
        Extent::Full => 12,
        Extent::Quick => 2,
    };
    let mut checks = Vec::new();
    for seed in 0..count {
        let mut case = Case::random(5000 + seed, &[DType::Bf16, DType::F16]);
        case.pass = Pass::ForwardBackward;
        // A graph holds the run of one rank.
        case.plan = PlanConfig::new(1);
        case.name = "graph".to_owned();
        let name = case.describe();
        let check = match replay(machine, &case) {
            Ok(unlike) => SelfCheck::of(name, case.seed, unlike as f64, 0.0),
            Err(error) => SelfCheck::failed(name, case.seed, error.to_string()),
        };
        checked(&check, count as usize);
        checks.push(check);
    }
    checks
}

/// Elements of all outputs, forward and backward, that a replay made otherwise than the direct run.
fn replay(machine: &CudaMachine, case: &Case) -> Result<usize, ExecError> {
    let spec = &case.spec;
    let plan = plan_mask(&case.mask, spec, &case.plan).map_err(|error| ExecError::Program {
        program: "attention".to_owned(),
        rank: 0,
        reason: ProgramFault::NotPlanned { reason: error.to_string() },
    })?;
    let inputs = case.inputs();
    let named = [
        ("q", Some(&inputs.q)),
        ("k", Some(&inputs.k)),
        ("v", Some(&inputs.v)),
        ("sink", inputs.sink.as_ref()),
        ("dout", inputs.dout.as_ref()),
        ("dlse", inputs.dlse.as_ref()),
    ];
    let config = WorldConfig { limit: Duration::from_secs(30), ..WorldConfig::default() };
    let world = World::new(1, config);
    let mut bound: Vec<(&str, CudaBuffer)> = Vec::new();
    let mut unlike = 0;
    let policy = OverlapPolicy::default();
    let forward = lower_attention_forward(&plan, 0, spec, policy, KeyBlocks::Unaligned);
    let backward = lower_attention_backward(&plan, 0, spec, policy, GradientReduction::Deterministic);
    for program in [forward, backward] {
        let Some((backend, transport)) = machine.connect(&world)?.pop() else { return Ok(unlike) };
        if bound.is_empty() {
            for (name, tensor) in named {
                if let Some(tensor) = tensor {
                    bound.push((name, backend.upload(name, tensor.clone())?));
                }
            }
        }
        let outputs = names(&program, BufferRole::Output);
        let wanted = names(&program, BufferRole::Input);
        let mut prepared = Prepared::new(program, backend, transport)?;
        let given: Vec<_> =
            bound.iter().filter(|(name, _)| wanted.iter().any(|wanted| wanted == name)).cloned().collect();
        prepared.run(&given)?;
        let direct = download(&prepared, &outputs)?;
        let mut graph = GraphRun::capture(&mut prepared)?;
        for spoilt in [None, given.iter().find(|(name, _)| *name == "dout").map(|(_, dout)| dout)] {
            if let Some(dout) = spoilt {
                run_spoilt(&mut graph, dout)?;
            }
            poison(graph.prepared(), &outputs)?;
            graph.start()?;
            graph.finish()?;
            let replayed = download(graph.prepared(), &outputs)?;
            unlike += direct.iter().zip(&replayed).map(|(a, b)| unlike_elements(a, b)).sum::<usize>();
        }
        // The backward reads what the forward wrote.
        for name in ["out", "lse"] {
            if let Some(buffer) = prepared.buffer(name) {
                bound.push((name, buffer.clone()));
            }
        }
    }
    Ok(unlike)
}

/// A whole step, forward and backward, of a rank on each GPU captured as one CUDA graph and replayed a hundred times over poisoned
/// outputs, under the machine's transport: the bits must be those of the step that was enqueued.
///
/// # Errors
/// When the machine cannot run the step at all.
pub fn selftest_step_graphs(machine: &CudaMachine, extent: Extent) -> Result<Vec<SelfCheck>, ExecError> {
    let (replays, masks) = match extent {
        Extent::Full => (100, &["causal", "full"][..]),
        Extent::Quick => (10, &["causal"][..]),
    };
    let ranks = machine.devices().len();
    let mut checks = Vec::new();
    for mask_name in masks {
        for stages in [1, 3] {
            let rows = 1024 * ranks;
            let mask = if *mask_name == "causal" { Mask::causal(rows) } else { Mask::full(rows) };
            let StagedAttention { spec, plan, inputs } =
                StagedAttention::new(mask, ranks, stages, 6, Pass::ForwardBackward)?;
            let (policy, reduction) = (OverlapPolicy::default(), GradientReduction::Deterministic);
            let name = format!(
                "{replays} replays of a step by {} on {ranks} GPUs, {mask_name}, {stages} remote stages: with other bits",
                machine.transport()
            );
            let unlike = StepBench::new(machine, &plan, &spec, &inputs, policy, reduction)
                .and_then(|mut step| step.unlike_replays(replays));
            checks.push(match unlike {
                Ok(unlike) => SelfCheck::of(name, 6, unlike as f64, 0.0),
                Err(error) => SelfCheck::failed(name, 6, error.to_string()),
            });
        }
    }
    Ok(checks)
}

type Rank = Prepared<CudaBackend, CudaTransport>;

fn names(program: &Program, role: BufferRole) -> Vec<String> {
    let buffers = program.buffers.iter().filter(|buffer| buffer.role == role);
    buffers.map(|buffer| buffer.name.clone()).collect()
}

fn download(prepared: &Rank, names: &[String]) -> Result<Vec<HostTensor>, ExecError> {
    let buffers = names.iter().filter_map(|name| prepared.buffer(name));
    buffers.map(|buffer| prepared.backend().download(buffer)).collect()
}

/// Replays once over a gradient of NaN, of which the next replay must find nothing.
fn run_spoilt(graph: &mut GraphRun<'_, CudaTransport>, dout: &CudaBuffer) -> Result<(), ExecError> {
    let backend = graph.prepared().backend().clone();
    let (setup, memory) = (backend.setup(), dout.memory());
    let failed = |error| backend.error(&"a gradient of NaN", error);
    let bytes: Vec<u8> = memory.download(setup, 0, memory.len()).map_err(failed)?;
    memory.fill(setup, 0xff).and_then(|()| setup.synchronize()).map_err(failed)?;
    graph.start()?;
    graph.finish()?;
    memory.upload(setup, 0, &bytes).and_then(|()| setup.synchronize()).map_err(failed)
}

/// NaN in every element.
fn poison(prepared: &Rank, names: &[String]) -> Result<(), ExecError> {
    for buffer in names.iter().filter_map(|name| prepared.buffer(name)) {
        let setup = prepared.backend().setup();
        let filled = buffer.memory().fill(setup, 0xff).and_then(|()| setup.synchronize());
        filled.map_err(|error| prepared.backend().error(&"poisoning", error))?;
    }
    Ok(())
}
