use std::time::Duration;

use counterpoint_exec::selftest::{Case, Extent, SelfCheck, unlike_elements};
use counterpoint_exec::{
    AttentionInputs, Backend, ExecError, HostTensor, Machine, Pass, Prepared, World, WorldConfig,
};
use counterpoint_plan::{DType, Plan, PlanConfig};
use counterpoint_schedule::{
    BufferRole, GradientReduction, Program, lower_attention_backward, lower_attention_forward,
};

use crate::{CudaBackend, CudaBuffer, CudaMachine, CudaTransport, GraphRun};

/// Whole Programs captured as CUDA graphs, a rank on every GPU of the machine in one graph, and replayed twice over poisoned outputs:
/// the bits must be those of the direct run. `checked` hears of every check, with how many there are.
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
        let PlanConfig { chunk_size, stages, .. } = case.plan;
        case.plan = PlanConfig { chunk_size, stages, ..PlanConfig::new(machine.devices().len()) };
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
    let plan = Plan::new(&case.mask, spec, &case.plan).map_err(|error| ExecError::Program {
        program: "attention".to_owned(),
        rank: 0,
        reason: error.to_string(),
    })?;
    let ranks = plan.ranks.len();
    let inputs = case.inputs();
    let config = WorldConfig { limit: Duration::from_secs(30), ..WorldConfig::default() };
    // What each rank's Programs are given.
    let mut bound: Vec<Vec<(&str, CudaBuffer)>> = Vec::new();
    let mut unlike = 0;
    let policy = case.run.policy;
    let forward = |rank| lower_attention_forward(&plan, rank, spec, policy);
    let backward =
        |rank| lower_attention_backward(&plan, rank, spec, policy, GradientReduction::Deterministic);
    for programs in [
        (0..ranks).map(forward).collect::<Vec<Program>>(),
        (0..ranks).map(backward).collect::<Vec<Program>>(),
    ] {
        let world = World::new(ranks, config.clone());
        let outputs = names(&programs[0], BufferRole::Output);
        let mut prepared = Vec::new();
        for (rank, ((backend, transport), program)) in
            machine.connect(&world)?.into_iter().zip(programs).enumerate()
        {
            if bound.len() == rank {
                bound.push(upload(&backend, inputs.of_rank(&plan.ranks[rank])?)?);
            }
            let wanted = names(&program, BufferRole::Input);
            let mut one = Prepared::new(program, backend, transport)?;
            for (name, buffer) in
                bound[rank].iter().filter(|(name, _)| wanted.iter().any(|wanted| wanted == name))
            {
                one.bind(name, buffer.clone())?;
            }
            prepared.push(one);
        }
        Prepared::run_ranks(&mut prepared)?;
        let direct = download(&prepared, &outputs)?;
        let mut graph = GraphRun::capture_ranks(&mut prepared)?;
        for _ in 0..2 {
            graph.ranks().iter().try_for_each(|rank| poison(rank, &outputs))?;
            graph.start()?;
            graph.finish()?;
            let replayed = download(graph.ranks(), &outputs)?;
            unlike += direct.iter().zip(&replayed).map(|(a, b)| unlike_elements(a, b)).sum::<usize>();
        }
        // The backward reads what the forward wrote.
        for (rank, bound) in prepared.iter().zip(&mut bound) {
            let written = ["out", "lse"].map(|name| (name, rank.buffer(name).cloned()));
            bound.extend(written.into_iter().filter_map(|(name, buffer)| Some((name, buffer?))));
        }
    }
    Ok(unlike)
}

/// A rank's tensors by the names that Programs have for them.
fn upload(
    backend: &CudaBackend,
    inputs: AttentionInputs,
) -> Result<Vec<(&'static str, CudaBuffer)>, ExecError> {
    let AttentionInputs { q, k, v, sink, dout } = inputs;
    let named = [("q", Some(q)), ("k", Some(k)), ("v", Some(v)), ("sink", sink), ("dout", dout)];
    let given = named.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
    given.map(|(name, tensor)| Ok((name, backend.upload(name, tensor)?))).collect()
}

type Rank = Prepared<CudaBackend, CudaTransport>;

fn names(program: &Program, role: BufferRole) -> Vec<String> {
    let buffers = program.buffers.iter().filter(|buffer| buffer.role == role);
    buffers.map(|buffer| buffer.name.clone()).collect()
}

/// The tensors of these names of all ranks.
fn download(ranks: &[Rank], names: &[String]) -> Result<Vec<HostTensor>, ExecError> {
    let of_rank = |rank: &Rank| -> Vec<Result<HostTensor, ExecError>> {
        let buffers = names.iter().filter_map(|name| rank.buffer(name));
        buffers.map(|buffer| rank.backend().download(buffer)).collect()
    };
    ranks.iter().flat_map(of_rank).collect()
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
