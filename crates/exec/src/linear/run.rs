use std::sync::Arc;

use counterpoint_plan::{DType, LinearPlan};
use counterpoint_schedule::{
    BufferRole, BufferSpec, OverlapPolicy, Program, WeightGradient, lower_linear_backward,
    lower_linear_forward, lower_linear_weight_gradient,
};

use super::shard::Shard;
use super::{LinearInputs, LinearOutputs, LinearRun};
use crate::{Backend, CpuMachine, ExecError, HostTensor, Machine, Prepared, RunConfig, World, WorldConfig};

/// How to run a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearConfig {
    /// What becomes of the gradient of the weight. Under [`WeightGradient::Deferred`] it is computed after the backward, and
    /// added to `main_grad` where there is one.
    pub weight_gradient: WeightGradient,
    /// Policy, limits and test tools; `deterministic` changes nothing, since a layer's results always have the same bits.
    pub run: RunConfig,
}

/// Runs a linear layer on CPU ranks: [`run_linear_on`] a [`CpuMachine`].
///
/// # Errors
/// As [`run_linear_on`].
pub fn run_linear(
    plan: &LinearPlan,
    inputs: &LinearInputs,
    config: &LinearConfig,
) -> Result<LinearRun, ExecError> {
    let machine = CpuMachine::new(config.run.policy.sm_margin(), config.run.slow_link)?;
    run_linear_on(&machine, plan, inputs, config)
}

/// Runs a linear layer on the ranks of a machine: splits the tensors, runs the forward (and, when there is a `dy`, the
/// backward and the gradient of the weight) of every rank, and puts the results together.
///
/// # Errors
/// [`ExecError::Tensor`] when a tensor does not fit the plan; [`ExecError::OutOfMemory`]; and whatever ends a run early.
pub fn run_linear_on<M: Machine>(
    machine: &M,
    plan: &LinearPlan,
    inputs: &LinearInputs,
    config: &LinearConfig,
) -> Result<LinearRun, ExecError> {
    check_inputs(plan, inputs, config)?;
    let run = Run { machine, plan, policy: config.run.policy, world: world(plan, &config.run) };
    let x = (Shard::of_input(plan), &inputs.x);
    let weight = (Shard::of_weight(plan), &inputs.weight);
    let bias = inputs.bias.as_ref().map(|bias| (Shard::of_bias(plan), bias));

    let mut given = vec![("x", x), ("weight", weight)];
    given.extend(bias.map(|bias| ("bias", bias)));
    let mut forward = run.prepare(|rank| lower_linear_forward(plan, rank, run.policy))?;
    run.bind(&mut forward, &given)?;
    let forward_timeline = Prepared::run_ranks(&mut forward)?;
    let mut result = LinearRun {
        outputs: LinearOutputs {
            y: run.join(&forward, "y", Shard::of_output(plan))?,
            dx: None,
            dweight: None,
            dbias: None,
        },
        forward: forward_timeline,
        backward: None,
        weight_gradient: None,
    };
    drop(forward);
    let Some(dy) = &inputs.dy else { return Ok(result) };

    let given = [("x", x), ("weight", weight), ("dy", (Shard::of_output(plan), dy))];
    let main_grad = run.main_grad(inputs)?;
    let gradient = config.weight_gradient;
    let mut backward = run.prepare(|rank| lower_linear_backward(plan, rank, gradient, run.policy))?;
    run.bind(&mut backward, &given)?;
    main_grad.bind::<M>(&mut backward)?;
    result.backward = Some(Prepared::run_ranks(&mut backward)?);
    result.outputs.dx = Some(run.join(&backward, "dx", Shard::of_input(plan))?);
    let mut last = backward;
    if gradient == WeightGradient::Deferred {
        let dtype = inputs.main_grad.as_ref().map(|(weight, _)| weight.dtype());
        let mut deferred = run.prepare(|rank| lower_linear_weight_gradient(plan, rank, dtype, run.policy))?;
        run.bind(&mut deferred, &given)?;
        main_grad.bind::<M>(&mut deferred)?;
        hand_over(&last, &mut deferred)?;
        result.weight_gradient = Some(Prepared::run_ranks(&mut deferred)?);
        last = deferred;
    }
    for (names, shard, to) in [
        (["dweight", "main_grad"], Shard::of_weight(plan), &mut result.outputs.dweight),
        (["dbias", "main_grad_bias"], Shard::of_bias(plan), &mut result.outputs.dbias),
    ] {
        for name in names {
            if last.iter().all(|rank| rank.buffer(name).is_some()) {
                *to = Some(run.join(&last, name, shard)?);
            }
        }
    }
    Ok(result)
}

type Rank<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;
type Buffer<M> = <<M as Machine>::Backend as Backend>::Buffer;

fn world(plan: &LinearPlan, run: &RunConfig) -> Arc<World> {
    let config = WorldConfig { limit: run.limit, poison: run.poison, faults: run.faults.clone() };
    World::new(plan.tp_size, config)
}

/// What every Program of a run shares.
struct Run<'a, M> {
    machine: &'a M,
    plan: &'a LinearPlan,
    policy: OverlapPolicy,
    world: Arc<World>,
}

impl<M: Machine> Run<'_, M> {
    fn prepare(&self, lower: impl Fn(usize) -> Program) -> Result<Vec<Rank<M>>, ExecError> {
        let programs: Vec<Program> = (0..self.plan.tp_size).map(lower).collect();
        let bytes = programs.iter().flat_map(|program| &program.buffers).map(BufferSpec::bytes);
        self.machine.check_memory(bytes.fold(0, u64::saturating_add), 0)?;
        let ranks = programs.into_iter().zip(self.machine.connect(&self.world)?);
        ranks.map(|(program, (backend, transport))| Rank::<M>::new(program, backend, transport)).collect()
    }

    /// Gives every rank its parts of those tensors that its Program asks for.
    fn bind(&self, ranks: &mut [Rank<M>], given: &[(&str, (Shard, &HostTensor))]) -> Result<(), ExecError> {
        for (index, rank) in ranks.iter_mut().enumerate() {
            for (name, (shard, whole)) in given {
                if wants(rank.program(), name) {
                    let part = shard.cut(self.plan, index, whole)?;
                    let buffer = rank.backend().upload(name, part)?;
                    rank.bind(name, buffer)?;
                }
            }
        }
        Ok(())
    }

    fn join(&self, ranks: &[Rank<M>], name: &str, shard: Shard) -> Result<HostTensor, ExecError> {
        let missing =
            || ExecError::Tensor { name: name.to_owned(), reason: "is no output of the Program".to_owned() };
        let parts = ranks.iter().map(|rank| {
            let buffer = rank.buffer(name).ok_or_else(missing)?;
            rank.backend().download(buffer)
        });
        Ok(shard.join(&parts.collect::<Result<Vec<_>, _>>()?))
    }

    fn main_grad(&self, inputs: &LinearInputs) -> Result<MainGrad, ExecError> {
        let Some((weight, bias)) = &inputs.main_grad else { return Ok(MainGrad(Vec::new())) };
        let mut tensors = vec![("main_grad", Shard::of_weight(self.plan), weight)];
        tensors.extend(bias.as_ref().map(|bias| ("main_grad_bias", Shard::of_bias(self.plan), bias)));
        let cut = |rank: usize| {
            tensors
                .iter()
                .map(|(name, shard, whole)| Ok((*name, shard.cut(self.plan, rank, whole)?)))
                .collect()
        };
        Ok(MainGrad((0..self.plan.tp_size).map(cut).collect::<Result<_, ExecError>>()?))
    }
}

/// Every rank's tensors that gradients are added to.
struct MainGrad(Vec<Vec<(&'static str, HostTensor)>>);

impl MainGrad {
    /// Gives them to Programs that update them.
    fn bind<M: Machine>(&self, ranks: &mut [Rank<M>]) -> Result<(), ExecError> {
        for (rank, tensors) in ranks.iter_mut().zip(&self.0) {
            for (name, tensor) in tensors {
                if wants(rank.program(), name) {
                    let buffer: Buffer<M> = rank.backend().upload(name, tensor.clone())?;
                    rank.bind(name, buffer)?;
                }
            }
        }
        Ok(())
    }
}

fn wants(program: &Program, name: &str) -> bool {
    let given = |spec: &BufferSpec| matches!(spec.role, BufferRole::Input | BufferRole::Updated);
    program.buffers.iter().any(|spec| given(spec) && spec.name == name)
}

/// What a backward has kept becomes an input of the gradient that it deferred.
fn hand_over<B: Backend, T: crate::Transport<B>>(
    from: &[Prepared<B, T>],
    to: &mut [Prepared<B, T>],
) -> Result<(), ExecError> {
    for (from, to) in from.iter().zip(to) {
        let kept = from.program().buffers.iter().filter(|spec| spec.role == BufferRole::Output);
        for spec in kept {
            if wants(to.program(), &spec.name)
                && let Some(buffer) = from.buffer(&spec.name).cloned()
            {
                to.bind(&spec.name, buffer)?;
            }
        }
    }
    Ok(())
}

fn check_inputs(plan: &LinearPlan, inputs: &LinearInputs, config: &LinearConfig) -> Result<(), ExecError> {
    let spec = &plan.spec;
    let (tokens, features_in, features_out) = (spec.tokens, spec.in_features, spec.out_features);
    check("x", &inputs.x, spec.dtype, &[tokens, features_in])?;
    check("weight", &inputs.weight, spec.dtype, &[features_out, features_in])?;
    check_present("bias", inputs.bias.is_some(), spec.has_bias)?;
    if let Some(bias) = &inputs.bias {
        check("bias", bias, spec.dtype, &[features_out])?;
    }
    if let Some(dy) = &inputs.dy {
        check("dy", dy, spec.dtype, &[tokens, features_out])?;
    }
    let dtype = match config.weight_gradient {
        WeightGradient::Accumulated(dtype) => {
            check_present("main_grad", inputs.main_grad.is_some(), true)?;
            dtype
        }
        WeightGradient::Deferred => spec.dtype.accumulator(),
        WeightGradient::Frozen | WeightGradient::Written => {
            return check_present("main_grad", inputs.main_grad.is_some(), false);
        }
    };
    let Some((weight, bias)) = &inputs.main_grad else { return Ok(()) };
    // A deferred gradient may be added to either type.
    let dtype = if config.weight_gradient == WeightGradient::Deferred && weight.dtype() == spec.dtype {
        spec.dtype
    } else {
        dtype
    };
    check("main_grad", weight, dtype, &[features_out, features_in])?;
    check_present("main_grad's bias", bias.is_some(), spec.has_bias)?;
    bias.as_ref().map_or(Ok(()), |bias| check("main_grad's bias", bias, dtype, &[features_out]))
}

fn check(name: &str, tensor: &HostTensor, dtype: DType, shape: &[usize]) -> Result<(), ExecError> {
    if tensor.dtype() == dtype && tensor.shape() == shape {
        return Ok(());
    }
    let reason = format!("must be {dtype:?} {shape:?}, not {:?} {:?}", tensor.dtype(), tensor.shape());
    Err(ExecError::Tensor { name: name.to_owned(), reason })
}

fn check_present(name: &str, given: bool, wanted: bool) -> Result<(), ExecError> {
    let reason = match (given, wanted) {
        (true, false) => "is given, and this run has no use for it",
        (false, true) => "is missing, and this run needs it",
        _ => return Ok(()),
    };
    Err(ExecError::Tensor { name: name.to_owned(), reason: reason.to_owned() })
}
