//! A layer of experts run once, from tensors to tensors.

use std::sync::Arc;

use counterpoint_plan::Routing;
use counterpoint_schedule::WeightGradient;

use super::{ExpertInputs, ExpertLayer, ExpertOptions, ExpertOutputs};
use crate::{ExecError, Group, Machine, WorldConfig};

/// Runs the forward of a layer of experts on the ranks of a machine, and where there is a `dy` its backward.
///
/// # Errors
/// [`ExecError::Tensor`] when a tensor does not fit the routing, or the routing the layer; [`ExecError::OutOfMemory`]; and whatever
/// ends a run early.
pub fn run_experts_on<M: Machine>(
    machine: &M,
    options: ExpertOptions,
    routing: &Arc<Routing>,
    inputs: &ExpertInputs,
    config: WorldConfig,
) -> Result<ExpertOutputs, ExecError> {
    let group = Group::connect(machine, routing.ranks(), config)?;
    let mut layer = ExpertLayer::new(&group, options)?;
    let weight = layer.scatter_weight(&inputs.weight)?;
    layer.bind_weight(&weight)?;
    layer.route(routing.clone())?;
    let x = layer.upload("x", inputs.x.clone())?;
    let y = layer.forward(&x)?.result;
    let mut outputs = ExpertOutputs { y: layer.download(&y)?, dx: None, dweight: None };
    let Some(dy) = &inputs.dy else { return Ok(outputs) };
    let main_grad = inputs.main_grad.as_ref().map(|sums| layer.scatter_weight(sums)).transpose()?;
    if let Some(main_grad) = &main_grad {
        layer.bind_main_grad(main_grad)?;
    }
    let dy = layer.upload("dy", dy.clone())?;
    let dx = layer.backward(&x, &dy)?.result;
    outputs.dx = Some(layer.download(&dx)?);
    if options.gradient != WeightGradient::Frozen {
        let parts = main_grad.or_else(|| layer.weight_gradient());
        outputs.dweight = parts.map(|parts| layer.gather_weight(&parts)).transpose()?;
    }
    Ok(outputs)
}
