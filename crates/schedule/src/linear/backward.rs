//! The backward of a tensor-parallel linear layer as a Program: dx, the weight's gradient at once or deferred, their collectives.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{DType, LinearKind, LinearPlan};

use super::exchange::{GatheredTokens, Lowering, rows_on_their_way};
use super::forward::group_rows;
use super::reduced::{ReducedTokens, SpreadUnder};
use super::{LayerPart, WeightGradient};
use crate::builder::{Mark, ProgramBuilder};
use crate::{
    Accumulate, BufferId, BufferRole, ColumnSum, Gemm, GemmLayout, GroupCast, Op, OverlapPolicy, Program,
    RowBlock, StreamKind,
};

/// Lowers one rank's backward. Inputs `dy` (as the forward's `y`), `weight` and, unless the weight is frozen, `x` (as the
/// forward's); outputs `dx` (as `x`) and what `gradient` says.
///
/// The sums of `dx` start to travel inside its product and go on under the gradient of the weight; the tokens that this one
/// needs of other ranks travel under `dx`'s product.
pub fn lower_linear_backward(
    plan: &LinearPlan,
    rank: usize,
    gradient: WeightGradient,
    policy: OverlapPolicy,
) -> Program {
    let mut p = ProgramBuilder::new("linear backward", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    match plan.spec.kind {
        LinearKind::Column => column(&mut lowering, gradient),
        LinearKind::Row => row(&mut lowering, gradient),
    }
    lowering.p.finish()
}

/// Lowers one rank's gradient of the weight, left out by a backward under [`WeightGradient::Deferred`]: inputs are that
/// backward's `x` and `dy` and what it has kept. `main_grad` is the type of what is added to, `None` to write `dweight`.
pub fn lower_linear_weight_gradient(
    plan: &LinearPlan,
    rank: usize,
    main_grad: Option<DType>,
    policy: OverlapPolicy,
) -> Program {
    let mut p = ProgramBuilder::new("linear weight gradient", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    let gradient = main_grad.map_or(WeightGradient::Written, WeightGradient::Accumulated);
    let Shapes { x, dy } = Shapes::of(&lowering);
    let gathers = lowering.gathers();
    let (x, dy) = match plan.spec.kind {
        LinearKind::Column => {
            let dy_buffer = lowering.input("dy", &dy);
            let x = match gathers {
                true => {
                    let tokens = plan.spec.tokens;
                    let buffer = lowering.input(KEPT, &[tokens, x[1]]);
                    lowering.whole(buffer, tokens)
                }
                false => {
                    let buffer = lowering.input("x", &x);
                    lowering.whole(buffer, x[0])
                }
            };
            (x, lowering.whole(dy_buffer, dy[0]))
        }
        LinearKind::Row => {
            let x_buffer = lowering.input("x", &x);
            let dy_buffer = lowering.input("dy", &dy);
            let dy = match gathers {
                true => {
                    let group = |group: usize| {
                        let rows = plan.group_tokens(group).iter().map(Range::len).sum();
                        lowering.input(&format!("{KEPT}_{group}"), &[rows, dy[1]])
                    };
                    let groups: Vec<BufferId> = (0..plan.groups()).map(group).collect();
                    lowering.all_tokens(dy_buffer, &groups)
                }
                false => lowering.whole(dy_buffer, dy[0]),
            };
            (lowering.whole(x_buffer, x[0]), dy)
        }
    };
    weight_gradient(&mut lowering, gradient, x, dy);
    lowering.p.finish()
}

/// The gathered tokens that a deferred gradient of the weight needs: of a column-parallel layer `[tokens, in_features]`, of a
/// row-parallel one, whose own tokens are where they were, the others' in a buffer for every group, its number behind the name.
pub(super) const KEPT: &str = "kept";

/// Of the rank's `x` and `dy`.
struct Shapes {
    x: [usize; 2],
    dy: [usize; 2],
}

impl Shapes {
    fn of(lowering: &Lowering<'_>) -> Self {
        let plan = lowering.plan;
        let (tokens, local) = (plan.spec.tokens, lowering.local_tokens());
        match plan.spec.kind {
            LinearKind::Column => {
                Self { x: [local, plan.spec.in_features], dy: [tokens, plan.local_out_features()] }
            }
            LinearKind::Row => {
                Self { x: [tokens, plan.local_in_features()], dy: [local, plan.spec.out_features] }
            }
        }
    }
}

fn column(lowering: &mut Lowering<'_>, gradient: WeightGradient) {
    let plan = lowering.plan;
    let (tokens, features) = (plan.spec.tokens, plan.spec.in_features);
    let shapes = Shapes::of(lowering);
    let dy = lowering.input("dy", &shapes.dy);
    let weight = lowering.input("weight", &[plan.local_out_features(), features]);
    let x = (gradient != WeightGradient::Frozen).then(|| lowering.input("x", &shapes.x));
    // What the gradient of the weight needs travels under the product of dx. Where that leaves it what it takes, it is enqueued behind
    // that, as sums are.
    let behind = plan.tp_size > 1 && lowering.p.policy().leaves_workers();
    let mut inputs = None;
    if let Some(x) = x.filter(|_| !behind) {
        inputs = Some(gather_all(lowering, x, features, gradient));
    }
    if plan.tp_size == 1 {
        let dx = lowering.p.buffer("dx", plan.spec.dtype, &[tokens, features], BufferRole::Output);
        let all = (lowering.whole(dy, tokens), vec![Range::new(0, tokens)]);
        input_gradient(lowering, 0, all, weight, dx);
    } else {
        let under = match gradient {
            WeightGradient::Written | WeightGradient::Accumulated(_) | WeightGradient::Replaced(_) => {
                SpreadUnder::Following
            }
            WeightGradient::Frozen | WeightGradient::Deferred => SpreadUnder::Product,
        };
        let mut sums = ReducedTokens::new(lowering, "dx", features, BufferRole::Output, under);
        let parts = sums.parts();
        for part in &parts {
            if part.number > 0 {
                sums.after_start(lowering, part.number);
            }
            let partial = sums.partial(lowering, part, plan.spec.dtype);
            let gemm = input_product(lowering, group_rows(plan, part.group, dy), weight, partial);
            sums.compute(lowering, part, "dx", vec![Gemm { columns: part.columns, ..gemm }]);
        }
        sums.after_start(lowering, parts.len());
        if let Some(x) = x.filter(|_| behind) {
            inputs = Some(gather_all(lowering, x, features, gradient));
        }
        sums.mark(lowering);
        if let Some(x) = inputs {
            let blocks = x.enter(lowering);
            let dy = lowering.whole(dy, tokens);
            weight_gradient(lowering, gradient, blocks, dy);
        }
        return sums.finish(lowering);
    }
    if let Some(x) = inputs {
        let blocks = x.enter(lowering);
        let dy = lowering.whole(dy, tokens);
        weight_gradient(lowering, gradient, blocks, dy);
    }
}

fn row(lowering: &mut Lowering<'_>, gradient: WeightGradient) {
    let dy = lowering.input("dy", &Shapes::of(lowering).dy);
    row_of(lowering, gradient, dy, None);
}

/// The backward of a row-parallel layer of this `dy`, which the computation has written by the mark, where there is one.
pub(super) fn row_of(
    lowering: &mut Lowering<'_>,
    gradient: WeightGradient,
    dy: BufferId,
    written: Option<Mark>,
) {
    let plan = lowering.plan;
    let (tokens, features) = (plan.spec.tokens, plan.local_in_features());
    let shapes = Shapes::of(lowering);
    let weight = lowering.input("weight", &[plan.spec.out_features, features]);
    let x = (gradient != WeightGradient::Frozen).then(|| lowering.input("x", &shapes.x));
    let dx = lowering.p.buffer("dx", plan.spec.dtype, &[tokens, features], BufferRole::Output);
    let mut all_dy = lowering.whole(dy, tokens);
    // What a deferred gradient keeps is in groups.
    let fused = lowering.p.policy().is_fused() && gradient != WeightGradient::Deferred;
    if lowering.gathers() && fused {
        let (rows, cast) = rows_on_their_way(lowering, dy, plan.spec.out_features, "dy_all");
        all_dy = rows.clone();
        let gemm = input_product(lowering, (rows, vec![Range::new(0, tokens)]), weight, dx);
        let op = Op::Fused(vec![Op::GroupCast(cast), Op::Gemm(gemm)]);
        lowering.p.push(lowering.compute, Some(0), "dx", op);
    } else if lowering.gathers() {
        let columns = plan.spec.out_features;
        let (name, role) = kept_or(gradient, "dy");
        let mut gathered = GatheredTokens::new(lowering, dy, columns, name, role);
        if let Some(written) = written {
            gathered.after(lowering, written);
        }
        if GatheredTokens::is_one_kernel(lowering) {
            let product = |lowering: &Lowering<'_>, rows| input_product(lowering, rows, weight, dx);
            gathered.multiply_as_they_arrive(lowering, "dx", product);
        } else {
            for stage in 0..=plan.groups() {
                let rows = gathered.enter(lowering, stage);
                input_gradient(lowering, stage, rows, weight, dx);
            }
        }
        all_dy = gathered.all(lowering);
    } else {
        let all = (all_dy.clone(), vec![Range::new(0, tokens)]);
        input_gradient(lowering, 0, all, weight, dx);
    }
    if let Some(x) = x {
        let blocks = lowering.whole(x, tokens);
        weight_gradient(lowering, gradient, blocks, all_dy);
    }
}

/// `dx[to] = dy[from] W`.
fn input_product(
    lowering: &Lowering<'_>,
    (a, out_rows): (Vec<RowBlock>, Vec<Range>),
    weight: BufferId,
    out: BufferId,
) -> Gemm {
    let b = lowering.whole(weight, lowering.plan.local_out_features());
    let pass_rows = lowering.plan.spec.tokens;
    Gemm {
        layout: GemmLayout::Nn,
        a: a.into(),
        b: b.into(),
        out,
        out_rows: out_rows.into(),
        pass_rows,
        columns: None,
        bias: None,
        accumulate: Accumulate::Start,
    }
}

/// The product of those rows, where there are any.
fn input_gradient(
    lowering: &mut Lowering<'_>,
    stage: usize,
    rows: (Vec<RowBlock>, Vec<Range>),
    weight: BufferId,
    out: BufferId,
) {
    if !rows.0.is_empty() {
        let op = input_product(lowering, rows, weight, out);
        lowering.p.push(lowering.compute, Some(stage), "dx", Op::Gemm(op));
    }
}

/// All tokens' inputs, here or on their way.
pub(super) struct AllInputs {
    blocks: Vec<RowBlock>,
    arrived: Option<Mark>,
}

impl AllInputs {
    /// Has the computation wait for them.
    pub(super) fn enter(self, lowering: &mut Lowering<'_>) -> Vec<RowBlock> {
        if let Some(arrived) = self.arrived {
            lowering.p.after(lowering.compute, None, "wait for x", arrived);
        }
        self.blocks
    }
}

/// All tokens' `x`, gathered where ranks have their own alone.
pub(super) fn gather_all(
    lowering: &mut Lowering<'_>,
    x: BufferId,
    columns: usize,
    gradient: WeightGradient,
) -> AllInputs {
    let plan = lowering.plan;
    let tokens = plan.spec.tokens;
    if !lowering.gathers() {
        return AllInputs { blocks: lowering.whole(x, tokens), arrived: None };
    }
    let (name, role) = kept_or(gradient, "x_all");
    let p = &mut lowering.p;
    let stream = p.stream("all-gather x", StreamKind::Communication);
    let all = p.buffer(name, plan.spec.dtype, &[tokens, columns], role);
    let op = GroupCast {
        // Own rows too: this operand of a product lies in one piece.
        part: Arc::new(plan.all_tokens_part(lowering.rank)),
        tensors: vec![(x, all)],
        wire_dtype: plan.spec.dtype,
        arrive: None,
        delivery: None,
    };
    p.push(stream, None, LayerPart::GatherInputs.label(), Op::GroupCast(op));
    let arrived = p.mark(stream, None, "x arrived");
    AllInputs { blocks: lowering.whole(all, tokens), arrived: Some(arrived) }
}

/// Name and role of a buffer with tokens of other ranks.
fn kept_or(gradient: WeightGradient, name: &str) -> (&str, BufferRole) {
    match gradient {
        WeightGradient::Deferred => (KEPT, BufferRole::Output),
        _ => (name, BufferRole::Scratch),
    }
}

/// `dW = dy^T x` and the sums of `dy`'s columns, written or added.
fn weight_gradient(
    lowering: &mut Lowering<'_>,
    gradient: WeightGradient,
    x: Vec<RowBlock>,
    dy: Vec<RowBlock>,
) {
    let plan = lowering.plan;
    let (dtype, role, names, accumulate) = match gradient {
        WeightGradient::Frozen | WeightGradient::Deferred => return,
        WeightGradient::Written => {
            (plan.spec.dtype, BufferRole::Output, ["dweight", "dbias"], Accumulate::Start)
        }
        WeightGradient::Accumulated(dtype) => {
            (dtype, BufferRole::Updated, ["main_grad", "main_grad_bias"], Accumulate::Continue)
        }
        WeightGradient::Replaced(dtype) => {
            (dtype, BufferRole::Updated, ["main_grad", "main_grad_bias"], Accumulate::Start)
        }
    };
    let (rows, columns) = (plan.local_out_features(), plan.local_in_features());
    let out = lowering.p.buffer(names[0], dtype, &[rows, columns], role);
    let bias = plan.spec.has_bias.then(|| lowering.p.buffer(names[1], dtype, &[rows], role));
    let op = Gemm {
        layout: GemmLayout::Tn,
        a: dy.clone().into(),
        b: x.into(),
        out,
        out_rows: vec![Range::new(0, rows)].into(),
        pass_rows: rows,
        columns: None,
        bias: None,
        accumulate,
    };
    lowering.p.push(lowering.compute, None, LayerPart::WeightGradient.label(), Op::Gemm(op));
    if let Some(dst) = bias {
        lowering.p.push(
            lowering.compute,
            None,
            LayerPart::BiasGradient.label(),
            Op::ColumnSum(ColumnSum { src: dy, dst, accumulate }),
        );
    }
}
