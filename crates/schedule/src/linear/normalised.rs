//! A row-parallel linear layer and the RMSNorm behind it as Programs, forward and backward: rows that were summed in groups come into
//! their order in the pass that normalises them.

use counterpoint_plan::{LinearKind, LinearPlan};
use serde::{Deserialize, Serialize};

use super::backward::row_of;
use super::exchange::Lowering;
use super::forward::{RowResult, row};
use super::{LayerPart, WeightGradient};
use crate::builder::ProgramBuilder;
use crate::{BufferRole, Op, OverlapPolicy, Program, RmsNorm, RmsNormBackward, StreamKind};

/// An RMSNorm behind a row-parallel layer: `h` is the layer's result, or the residual and it together, rounded, and
/// `y = h / sqrt(mean of h's squares + epsilon) norm_weight`, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormSpec {
    /// What is added to the mean of squares.
    pub epsilon: f64,
    /// Whether a residual is added to the layer's result.
    pub has_residual: bool,
    /// Whether there is a weight; without one it is 1.
    pub has_weight: bool,
}

impl NormSpec {
    /// With a residual and a weight, as between the blocks of a transformer.
    pub const fn new(epsilon: f64) -> Self {
        Self { epsilon, has_residual: true, has_weight: true }
    }
}

/// Lowers one rank's forward of a row-parallel layer and the RMSNorm behind it. Inputs as
/// [`lower_linear_forward`](super::lower_linear_forward)'s and, where there are such, `residual` (as `y`) and `norm_weight`
/// `[out_features]`; outputs `sum`, which is `h`, and `y`. Rows that were summed in groups come into their order in that pass.
///
/// # Panics
/// For a column-parallel layer, whose rows are not whole.
pub fn lower_normalised_forward(
    plan: &LinearPlan,
    rank: usize,
    norm: NormSpec,
    policy: OverlapPolicy,
) -> Program {
    assert_eq!(plan.spec.kind, LinearKind::Row, "only a row-parallel layer has whole rows");
    let mut p = ProgramBuilder::new("normalised linear forward", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    let (rows, features, dtype) = (lowering.local_tokens(), plan.spec.out_features, plan.spec.dtype);
    let src = row(&mut lowering, "partials", BufferRole::Scratch);
    let src = match src {
        RowResult::One(buffer) => lowering.whole(buffer, rows),
        RowResult::Sums(sums) => sums.rows(&mut lowering),
    };
    let residual = norm.has_residual.then(|| lowering.input("residual", &[rows, features]));
    let weight = norm.has_weight.then(|| lowering.input("norm_weight", &[features]));
    let sum = lowering.p.buffer("sum", dtype, &[rows, features], BufferRole::Output);
    let out = lowering.p.buffer("y", dtype, &[rows, features], BufferRole::Output);
    // A rank without tokens has nothing to normalise.
    if rows > 0 {
        let op = RmsNorm { src, residual, sum, weight, epsilon: norm.epsilon, out };
        lowering.p.push(compute, None, LayerPart::Norm.label(), Op::RmsNorm(op));
    }
    lowering.p.finish()
}

/// Lowers one rank's backward of them. Inputs `dy` and `sum` (as the forward's `y` and `sum`), with a residual `dsum`, what else goes
/// into the gradient of `sum`, with a weight `norm_weight`; and as [`lower_linear_backward`](super::lower_linear_backward)'s. Outputs `dx`,
/// `dresidual` (as `sum`: the gradient of the residual, and of the layer's result), with a weight `dnorm_weight` `[out_features]`, in the type
/// of sums, of this rank's tokens; and what `gradient` says.
///
/// # Panics
/// For a column-parallel layer, and for [`WeightGradient::Deferred`].
pub fn lower_normalised_backward(
    plan: &LinearPlan,
    rank: usize,
    norm: NormSpec,
    gradient: WeightGradient,
    policy: OverlapPolicy,
) -> Program {
    assert_eq!(plan.spec.kind, LinearKind::Row, "only a row-parallel layer has whole rows");
    assert_ne!(gradient, WeightGradient::Deferred, "what such a gradient needs would be written over");
    let mut p = ProgramBuilder::new("normalised linear backward", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    let (rows, features, dtype) = (lowering.local_tokens(), plan.spec.out_features, plan.spec.dtype);
    let dout = lowering.input("dy", &[rows, features]);
    let sum = lowering.input("sum", &[rows, features]);
    let dsum = norm.has_residual.then(|| lowering.input("dsum", &[rows, features]));
    let weight = norm.has_weight.then(|| lowering.input("norm_weight", &[features]));
    let p = &mut lowering.p;
    let dweight = norm
        .has_weight
        .then(|| p.buffer("dnorm_weight", dtype.accumulator(), &[features], BufferRole::Output));
    let dh = p.buffer("dresidual", dtype, &[rows, features], BufferRole::Output);
    let op = RmsNormBackward { dout, sum, weight: weight.zip(dweight), dsum, epsilon: norm.epsilon, dh };
    p.push(compute, None, LayerPart::NormGradient.label(), Op::RmsNormBackward(op));
    let made = p.mark(compute, None, "dnorm done");
    row_of(&mut lowering, gradient, dh, Some(made));
    lowering.p.finish()
}
