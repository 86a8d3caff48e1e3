//! The passes of a layer of experts.

use counterpoint_mask::Range;
use counterpoint_plan::{ExpertKind, ExpertPlan};

use super::Lowering;
use super::from_experts::LeavingTokens;
use super::to_experts::ArrivingTokens;
use crate::{
    Accumulate, BufferId, BufferRole, ExpertRowsOf, Gemm, GemmLayout, LayerPart, Op, OverlapPolicy, Program,
    RowBlock, RowBlocks, WeightGradient,
};

/// Lowers one rank's forward: inputs `x` and `weight`, output `y`; see [`counterpoint_plan::ExpertSpec`] for what they are.
///
/// Of a dispatch the products of the rank's own tokens hide the first group's way, and each group's the next. Of a combine each
/// group travels back under the products of those after it.
pub fn lower_expert_forward(plan: &ExpertPlan, rank: usize, policy: OverlapPolicy) -> Program {
    let mut lowering = Lowering::new(&format!("expert {} forward", plan.spec.kind), plan, rank, policy);
    let (spec, rows, tokens) = (plan.spec, lowering.expert_rows(), plan.tokens_of(rank));
    match spec.kind {
        ExpertKind::Dispatch => {
            let x = lowering.input("x", tokens, spec.in_features);
            let weight = lowering.weight();
            let y = lowering.p.buffer("y", spec.dtype, &[rows, spec.out_features], BufferRole::Output);
            let mut arriving = ArrivingTokens::new(&mut lowering, x, spec.in_features, "x");
            arriving.multiply(&mut lowering, (GemmLayout::Nt, "y"), weight, y);
        }
        ExpertKind::Combine => {
            let x = lowering.input("x", rows, spec.in_features);
            let weight = lowering.weight();
            let mut leaving = LeavingTokens::new(&mut lowering, "y", spec.out_features);
            leaving.multiply(&mut lowering, (GemmLayout::Nt, "y"), weight, x);
            leaving.finish(&mut lowering);
        }
    }
    lowering.p.finish()
}

/// Lowers one rank's backward: inputs `dy` (as the forward's `y`), `weight` and, unless the weights are frozen, `x` (as the forward's);
/// outputs `dx` (as `x`) and what `gradient` says, `[experts x out_features, in_features]`. An expert without rows has a gradient of
/// zeros, or adds nothing.
///
/// Of a dispatch `x` travels to the experts again under the products of `dx`, which travels back under the gradient of the weights.
///
/// # Panics
/// For [`WeightGradient::Deferred`] and [`WeightGradient::Replaced`], which layers of experts do not have.
pub fn lower_expert_backward(
    plan: &ExpertPlan,
    rank: usize,
    gradient: WeightGradient,
    policy: OverlapPolicy,
) -> Program {
    let has_not = matches!(gradient, WeightGradient::Deferred | WeightGradient::Replaced(_));
    assert!(!has_not, "gradients of experts are neither deferred nor replaced");
    let mut lowering = Lowering::new(&format!("expert {} backward", plan.spec.kind), plan, rank, policy);
    match plan.spec.kind {
        ExpertKind::Dispatch => dispatch(&mut lowering, gradient),
        ExpertKind::Combine => combine(&mut lowering, gradient),
    }
    lowering.p.finish()
}

fn dispatch(lowering: &mut Lowering<'_>, gradient: WeightGradient) {
    let (spec, rank) = (lowering.plan.spec, lowering.rank);
    let (rows, tokens) = (lowering.expert_rows(), lowering.plan.tokens_of(rank));
    let dy = lowering.input("dy", rows, spec.out_features);
    let weight = lowering.weight();
    let is_frozen = gradient == WeightGradient::Frozen;
    let x = (!is_frozen).then(|| lowering.input("x", tokens, spec.in_features));
    // Where what hides it leaves it what it takes, a collective is enqueued behind that.
    let behind = lowering.p.policy().leaves_workers();
    let gather = |lowering: &mut Lowering<'_>, x: BufferId| {
        let mut arriving = ArrivingTokens::new(lowering, x, spec.in_features, "x");
        arriving.send_all(lowering);
        arriving
    };
    let mut inputs = x.filter(|_| !behind).map(|x| gather(lowering, x));
    let mut leaving = LeavingTokens::new(lowering, "dx", spec.in_features);
    leaving.multiply(lowering, (GemmLayout::Nn, "dx"), weight, dy);
    leaving.after_start(lowering, lowering.plan.groups());
    if let Some(x) = x.filter(|_| behind) {
        inputs = Some(gather(lowering, x));
    }
    leaving.mark(lowering);
    if let Some(x) = inputs {
        x.wait_for_all(lowering);
        let of_expert = |lowering: &Lowering<'_>, expert: usize| {
            let dy = vec![RowBlock { buffer: dy, rows: lowering.rows.experts[expert] }].into();
            (dy, x.blocks(lowering, expert))
        };
        weight_gradient(lowering, gradient, of_expert);
    }
    leaving.finish(lowering);
}

fn combine(lowering: &mut Lowering<'_>, gradient: WeightGradient) {
    let (spec, rank) = (lowering.plan.spec, lowering.rank);
    let (rows, tokens) = (lowering.expert_rows(), lowering.plan.tokens_of(rank));
    let dy = lowering.input("dy", tokens, spec.out_features);
    let weight = lowering.weight();
    let is_frozen = gradient == WeightGradient::Frozen;
    let x = (!is_frozen).then(|| lowering.input("x", rows, spec.in_features));
    let dx = lowering.p.buffer("dx", spec.dtype, &[rows, spec.in_features], BufferRole::Output);
    let mut arriving = ArrivingTokens::new(lowering, dy, spec.out_features, "dy");
    arriving.multiply(lowering, (GemmLayout::Nn, "dx"), weight, dx);
    if let Some(x) = x {
        let of_expert = |lowering: &Lowering<'_>, expert: usize| {
            let x = vec![RowBlock { buffer: x, rows: lowering.rows.experts[expert] }].into();
            (arriving.blocks(lowering, expert), x)
        };
        weight_gradient(lowering, gradient, of_expert);
    }
}

/// `dW = dy^T x` of every expert, written or added; `of_expert` says where the rows of both are.
fn weight_gradient(
    lowering: &mut Lowering<'_>,
    gradient: WeightGradient,
    of_expert: impl Fn(&Lowering<'_>, usize) -> (RowBlocks, RowBlocks),
) {
    let spec = lowering.plan.spec;
    let (name, dtype, role, accumulate) = match gradient {
        WeightGradient::Frozen | WeightGradient::Replaced(_) | WeightGradient::Deferred => return,
        WeightGradient::Written => ("dweight", spec.dtype, BufferRole::Output, Accumulate::Start),
        WeightGradient::Accumulated(dtype) => ("main_grad", dtype, BufferRole::Updated, Accumulate::Continue),
    };
    let shape = [lowering.experts() * spec.out_features, spec.in_features];
    let out = lowering.p.buffer(name, dtype, &shape, role);
    let mut products = Vec::new();
    for expert in 0..lowering.experts() {
        let rows = Range::new(expert * spec.out_features, (expert + 1) * spec.out_features);
        if !lowering.rows.experts[expert].is_empty() {
            let (a, b) = of_expert(lowering, expert);
            let (layout, pass_rows, out_rows) = (GemmLayout::Tn, spec.out_features, vec![rows].into());
            products.push(Gemm {
                layout,
                a,
                b,
                out,
                out_rows,
                pass_rows,
                columns: None,
                bias: None,
                accumulate,
            });
        } else if accumulate == Accumulate::Start {
            lowering.p.push(
                lowering.compute,
                None,
                LayerPart::WeightGradient.label(),
                Op::ZeroRows { dst: out, rows },
            );
        }
    }
    lowering.multiply(None, LayerPart::WeightGradient.label(), products, ExpertRowsOf::Tokens);
}
