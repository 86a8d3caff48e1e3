//! A linear layer run once, from tensors to tensors.

use counterpoint_plan::{DType, LinearPlan};
use counterpoint_schedule::WeightGradient;

use super::layer::{LayerGradient, LinearLayer, LinearTensor, RankBuffers, check_present};
use super::{LinearInputs, LinearOutputs, LinearRun, PlannedPass, PlannedPasses};
use crate::{CpuMachine, ExecError, Group, HostTensor, Machine, RunConfig, TensorFault};

/// How to run a layer.
#[derive(Clone, Debug)]
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
    let main_grad = inputs.main_grad.as_ref();
    let gradient = match config.weight_gradient {
        WeightGradient::Frozen => LayerGradient::Frozen,
        WeightGradient::Written => LayerGradient::Written,
        WeightGradient::Accumulated(dtype) => LayerGradient::Accumulated(dtype),
        WeightGradient::Replaced(dtype) => LayerGradient::Replaced(dtype),
        WeightGradient::Deferred => {
            LayerGradient::Deferred { into: main_grad.map(|(weight, _)| weight.dtype()), limit: 1 }
        }
    };
    let group = Group::connect(machine, plan.tp_size, config.run.world.clone())?;
    let policies = config.run.policy;
    let pass = |policy| PlannedPass { plan: plan.clone(), policy };
    let layer = match inputs.dy {
        Some(_) => {
            let passes = PlannedPasses { forward: pass(policies.forward), backward: pass(policies.backward) };
            LinearLayer::with_passes(&group, passes, gradient)
        }
        None => LinearLayer::forward_only(&group, plan.clone(), policies.forward),
    };
    // Other ranks wait for this one by now: they are to hear of it.
    let mut layer = layer.map_err(|error| group.fail_with(error))?;
    let weight = layer.scatter(LinearTensor::Weight, &inputs.weight)?;
    let bias = scatter(&layer, LinearTensor::Bias, inputs.bias.as_ref())?;
    layer.bind_weight(&weight, bias.as_ref())?;
    let x = layer.scatter(LinearTensor::Input, &inputs.x)?;
    let forward = layer.forward(&x)?;
    let mut result = LinearRun {
        outputs: LinearOutputs {
            y: layer.gather(LinearTensor::Output, &forward.result)?,
            dx: None,
            dweight: None,
            dbias: None,
        },
        forward: forward.timeline,
        backward: None,
        weight_gradient: None,
    };
    let Some(dy) = &inputs.dy else { return Ok(result) };

    let sums = main_grad.map(|(weight, bias)| {
        let weight = layer.scatter(LinearTensor::Weight, weight)?;
        Ok::<_, ExecError>((weight, scatter(&layer, LinearTensor::Bias, bias.as_ref())?))
    });
    let sums = sums.transpose()?;
    if let Some((weight, bias)) = &sums {
        layer.bind_main_grad(weight, bias.as_ref())?;
    }
    let dy = layer.scatter(LinearTensor::Output, dy)?;
    let backward = layer.backward(&x, &dy)?;
    result.outputs.dx = Some(layer.gather(LinearTensor::Input, &backward.result)?);
    result.backward = Some(backward.timeline);
    result.weight_gradient = layer.flush()?.pop();
    if let Some((weight, bias)) = sums.or_else(|| layer.weight_gradient()) {
        result.outputs.dweight = Some(layer.gather(LinearTensor::Weight, &weight)?);
        result.outputs.dbias = bias.map(|bias| layer.gather(LinearTensor::Bias, &bias)).transpose()?;
    }
    Ok(result)
}

fn scatter<M: Machine>(
    layer: &LinearLayer<M>,
    tensor: LinearTensor,
    whole: Option<&HostTensor>,
) -> Result<Option<RankBuffers<M>>, ExecError> {
    whole.map(|whole| layer.scatter(tensor, whole)).transpose()
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
        WeightGradient::Accumulated(dtype) | WeightGradient::Replaced(dtype) => {
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
    TensorFault::of_layout((dtype, shape), (tensor.dtype(), tensor.shape()))
        .map_or(Ok(()), |fault| Err(ExecError::tensor(name, fault)))
}
