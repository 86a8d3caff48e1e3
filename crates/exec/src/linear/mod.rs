//! Tensor-parallel linear layers from tensors to tensors.

mod deferred;
mod gemm_collective;
mod layer;
mod normalised;
mod overlap;
mod parallel;
mod run;
mod shard;
mod shared_input;

use counterpoint_plan::{DType, LinearSpec};
use counterpoint_schedule::Timeline;

use crate::HostTensor;
use crate::random_stream;

pub use gemm_collective::{
    GemmCollectiveSpec, GemmOverlap, PreparedOn, all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter,
};
pub use layer::{LayerCall, LayerGradient, LayerPass, LinearLayer, LinearTensor, NamedBuffers, RankBuffers};
pub use normalised::{NormalisedBackward, NormalisedForward, RowParallelLinearRmsNorm};
pub use overlap::{LayerOverlap, PassesUpTo, PlannedPass, PlannedPasses};
pub use parallel::{ColumnParallelLinear, LinearOptions, RowParallelLinear};
pub use run::{LinearConfig, run_linear, run_linear_on};
pub(crate) use shard::join_rows;
pub use shared_input::{SharedInputForward, SharedInputLinear};

/// Tensors of a whole layer, in global order.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearInputs {
    /// `[tokens, in_features]`
    pub x: HostTensor,
    /// `[out_features, in_features]`
    pub weight: HostTensor,
    /// `[out_features]`, where the layer has one.
    pub bias: Option<HostTensor>,
    /// `[tokens, out_features]`; its presence asks for the backward.
    pub dy: Option<HostTensor>,
    /// What gradients of the weight are added to under [`WeightGradient::Accumulated`](counterpoint_schedule::WeightGradient):
    /// `[out_features, in_features]` and, where the layer has a bias, `[out_features]`.
    pub main_grad: Option<(HostTensor, Option<HostTensor>)>,
}

/// Standard-normal tensors of a layer, a `main_grad` of this type where one is asked for, and a `dy` for a backward. Each has its own
/// stream of the generator, so its numbers depend on nothing but the seed, its name and its size.
pub fn random_linear_inputs(
    spec: &LinearSpec,
    main_grad: Option<DType>,
    seed: u64,
    backward: bool,
) -> LinearInputs {
    let LinearSpec { tokens, in_features, out_features, has_bias, dtype, .. } = *spec;
    let tensor = |stream, shape: &[usize], dtype| random_stream(shape.to_vec(), dtype, seed, stream);
    let bias = |stream, dtype| has_bias.then(|| tensor(stream, &[out_features], dtype));
    LinearInputs {
        x: tensor(0, &[tokens, in_features], dtype),
        weight: tensor(1, &[out_features, in_features], dtype),
        bias: bias(2, dtype),
        dy: backward.then(|| tensor(3, &[tokens, out_features], dtype)),
        main_grad: main_grad.map(|dtype| (tensor(4, &[out_features, in_features], dtype), bias(5, dtype))),
    }
}

/// Results of a whole layer, in global order.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearOutputs {
    /// `[tokens, out_features]`
    pub y: HostTensor,
    /// `[tokens, in_features]`, when the backward ran; likewise the rest.
    pub dx: Option<HostTensor>,
    /// `[out_features, in_features]`, unless the weight is frozen: the gradient, or what it was added to.
    pub dweight: Option<HostTensor>,
    /// `[out_features]`, likewise.
    pub dbias: Option<HostTensor>,
}

/// What a run gave.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearRun {
    /// Results in global order.
    pub outputs: LinearOutputs,
    /// Measured forward.
    pub forward: Timeline,
    /// Measured backward.
    pub backward: Option<Timeline>,
    /// Measured gradient of the weight, where it was deferred.
    pub weight_gradient: Option<Timeline>,
}
