//! The forward of a tensor-parallel linear layer as a Program.

use counterpoint_mask::Range;
use counterpoint_plan::{LinearKind, LinearPlan};

use super::exchange::{GatheredTokens, Lowering, rows_on_their_way};
use super::reduced::{ReducedTokens, SpreadUnder};
use crate::builder::ProgramBuilder;
use crate::{
    Accumulate, BufferId, BufferRole, Gemm, GemmLayout, Op, OverlapPolicy, Program, RowBlock, StreamKind,
};

/// Lowers one rank's forward. Inputs `x`, `weight` and, where the layer has one, `bias`; output `y`. Of a column-parallel layer
/// `x` is `[local tokens, in_features]` and `y` `[tokens, local out_features]`, of a row-parallel one `x` is
/// `[tokens, local in_features]` and `y` `[local tokens, out_features]`.
pub fn lower_linear_forward(plan: &LinearPlan, rank: usize, policy: OverlapPolicy) -> Program {
    let mut p = ProgramBuilder::new("linear forward", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    match plan.spec.kind {
        LinearKind::Column => column(&mut lowering),
        LinearKind::Row => {
            if let RowResult::Sums(sums) = row(&mut lowering, "y", BufferRole::Output) {
                sums.finish(&mut lowering);
            }
        }
    }
    lowering.p.finish()
}

/// `y[to] = x[from] W^T + bias`.
fn product(
    lowering: &Lowering<'_>,
    (a, out_rows): (Vec<RowBlock>, Vec<Range>),
    weight: BufferId,
    bias: Option<BufferId>,
    out: BufferId,
) -> Gemm {
    let b = lowering.whole(weight, lowering.plan.local_out_features());
    let pass_rows = lowering.plan.spec.tokens;
    Gemm {
        layout: GemmLayout::Nt,
        a: a.into(),
        b: b.into(),
        out,
        out_rows: out_rows.into(),
        pass_rows,
        columns: None,
        bias,
        accumulate: Accumulate::Start,
    }
}

/// The product of those rows, where there are any.
fn multiply(
    lowering: &mut Lowering<'_>,
    stage: usize,
    rows: (Vec<RowBlock>, Vec<Range>),
    weight: BufferId,
    bias: Option<BufferId>,
    out: BufferId,
) {
    if !rows.0.is_empty() {
        let op = product(lowering, rows, weight, bias, out);
        lowering.p.push(lowering.compute, Some(stage), "y", Op::Gemm(op));
    }
}

fn column(lowering: &mut Lowering<'_>) {
    let plan = lowering.plan;
    let (tokens, features) = (plan.spec.tokens, plan.local_out_features());
    let x = lowering.input("x", &[lowering.local_tokens(), plan.spec.in_features]);
    let weight = lowering.input("weight", &[features, plan.spec.in_features]);
    let bias = plan.spec.has_bias.then(|| lowering.input("bias", &[features]));
    let y = lowering.p.buffer("y", plan.spec.dtype, &[tokens, features], BufferRole::Output);
    if !lowering.gathers() {
        let all = (lowering.whole(x, tokens), vec![Range::new(0, tokens)]);
        return multiply(lowering, 0, all, weight, bias, y);
    }
    if lowering.p.policy().is_fused() {
        let (rows, cast) = rows_on_their_way(lowering, x, plan.spec.in_features, "x_all");
        let gemm = product(lowering, (rows, vec![Range::new(0, tokens)]), weight, bias, y);
        let fused = Op::Fused(vec![Op::GroupCast(cast), Op::Gemm(gemm)]);
        lowering.p.push(lowering.compute, Some(0), "y", fused);
        return;
    }
    let mut gathered = GatheredTokens::new(lowering, x, plan.spec.in_features, "x", BufferRole::Scratch);
    if GatheredTokens::is_one_kernel(lowering) {
        let product = |lowering: &Lowering<'_>, rows| product(lowering, rows, weight, bias, y);
        return gathered.multiply_as_they_arrive(lowering, "y", product);
    }
    if !lowering.p.policy().overlaps() {
        let rows = gathered.enter_all(lowering);
        return multiply(lowering, 0, (rows, vec![Range::new(0, tokens)]), weight, bias, y);
    }
    for stage in 0..=plan.groups() {
        let rows = gathered.enter(lowering, stage);
        multiply(lowering, stage, rows, weight, bias, y);
    }
}

/// What a row-parallel layer's products become.
pub(super) enum RowResult {
    /// All rows are here.
    One(BufferId),
    /// They are summed over ranks.
    Sums(Box<ReducedTokens>),
}

/// The layer's result, in buffers called `name` of this role.
pub(super) fn row(lowering: &mut Lowering<'_>, name: &str, role: BufferRole) -> RowResult {
    let plan = lowering.plan;
    let (tokens, features) = (plan.spec.tokens, plan.spec.out_features);
    let x = lowering.input("x", &[tokens, plan.local_in_features()]);
    let weight = lowering.input("weight", &[features, plan.local_in_features()]);
    // Once in the sum over ranks.
    let bias = plan.spec.has_bias.then(|| lowering.input("bias", &[features]));
    let bias = bias.filter(|_| lowering.rank == 0);
    if plan.tp_size == 1 {
        let y = lowering.p.buffer(name, plan.spec.dtype, &[tokens, features], role);
        let all = (lowering.whole(x, tokens), vec![Range::new(0, tokens)]);
        multiply(lowering, 0, all, weight, bias, y);
        return RowResult::One(y);
    }
    let mut sums = ReducedTokens::new(lowering, name, features, role, SpreadUnder::Product);
    for part in sums.parts() {
        if part.number > 0 {
            sums.after_start(lowering, part.number);
        }
        let partial = sums.partial(lowering, &part, plan.spec.dtype);
        let gemm = product(lowering, group_rows(plan, part.group, x), weight, bias, partial);
        sums.compute(lowering, &part, "y", vec![Gemm { columns: part.columns, ..gemm }]);
    }
    RowResult::Sums(Box::new(sums))
}

/// The rows of a group in a buffer of all tokens, and where they go in a buffer of the group's rows alone.
pub(super) fn group_rows(plan: &LinearPlan, group: usize, all: BufferId) -> (Vec<RowBlock>, Vec<Range>) {
    let pieces: Vec<Range> = plan.group_tokens(group).into_iter().filter(|piece| !piece.is_empty()).collect();
    let rows = pieces.iter().map(Range::len).sum();
    (pieces.into_iter().map(|rows| RowBlock { buffer: all, rows }).collect(), vec![Range::new(0, rows)])
}
