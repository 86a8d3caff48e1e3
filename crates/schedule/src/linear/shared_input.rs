//! Column-parallel layers that share one input, such as q, k and v, or gate and up: one gather of it, and one sum of its gradient.

use counterpoint_mask::Range;
use counterpoint_plan::{Activations, DType, LinearPlan};
use serde::{Deserialize, Serialize};

use super::backward::{KEPT, gather_all};
use super::exchange::{GatheredTokens, Lowering};
use super::forward::group_rows;
use super::reduced::{ReducedTokens, SpreadUnder};
use super::{LayerPart, WeightGradient};
use crate::builder::ProgramBuilder;
use crate::{
    Accumulate, BufferId, BufferRole, ColumnSum, Gemm, GemmLayout, Op, OverlapPolicy, Program, RowBlock,
    StreamKind,
};

/// What becomes of the gradient of the input of column-parallel layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputGradient {
    /// It is summed over ranks: all-reduced, or reduce-scattered under sequence parallelism.
    #[default]
    Summed,
    /// Each rank keeps its partial sums, which the caller adds to others and sums over ranks: `allreduce_dgrad = false` of
    /// Megatron-LM. For replicated activations.
    Partial,
}

/// Layers on their ranks.
#[derive(Clone, Copy, Debug)]
pub struct SharedInput<'a> {
    /// A column-parallel layer with the output features of all of them.
    pub plan: &'a LinearPlan,
    /// Output features of each on a rank, which add up to the plan's.
    pub outputs: &'a [usize],
}

/// Lowers one rank's forward of layers that share `x`: inputs `x` and of each layer, by its number, `weight_0` and, where layers have
/// one, `bias_0`; outputs `y_0` and so on.
pub fn lower_shared_input_forward(layers: SharedInput<'_>, rank: usize, policy: OverlapPolicy) -> Program {
    let plan = layers.plan;
    let mut p = ProgramBuilder::new("shared input forward", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    let (tokens, dtype) = (plan.spec.tokens, plan.spec.dtype);
    let x = lowering.input("x", &[lowering.local_tokens(), plan.spec.in_features]);
    let mut parts = Vec::new();
    for (at, &features) in layers.outputs.iter().enumerate() {
        let weight = lowering.input(&format!("weight_{at}"), &[features, plan.spec.in_features]);
        let bias = plan.spec.has_bias.then(|| lowering.input(&format!("bias_{at}"), &[features]));
        let y = lowering.p.buffer(&format!("y_{at}"), dtype, &[tokens, features], BufferRole::Output);
        parts.push((weight, features, bias, y));
    }
    let multiply = |lowering: &mut Lowering<'_>, stage, (a, out_rows): (Vec<RowBlock>, Vec<Range>)| {
        if a.is_empty() {
            return;
        }
        for &(weight, features, bias, out) in &parts {
            let op = Gemm {
                layout: GemmLayout::Nt,
                a: a.clone().into(),
                b: lowering.whole(weight, features).into(),
                out,
                out_rows: out_rows.clone().into(),
                pass_rows: tokens,
                columns: None,
                bias,
                accumulate: Accumulate::Start,
            };
            lowering.p.push(lowering.compute, Some(stage), "y", Op::Gemm(op));
        }
    };
    if !lowering.gathers() {
        let all = (lowering.whole(x, tokens), vec![Range::new(0, tokens)]);
        multiply(&mut lowering, 0, all);
        return lowering.p.finish();
    }
    let columns = plan.spec.in_features;
    let mut gathered = GatheredTokens::new(&mut lowering, x, columns, "x", BufferRole::Scratch);
    if !lowering.p.policy().overlaps() {
        let rows = gathered.enter_all(&mut lowering);
        multiply(&mut lowering, 0, (rows, vec![Range::new(0, tokens)]));
        return lowering.p.finish();
    }
    for stage in 0..=plan.groups() {
        let rows = gathered.enter(&mut lowering, stage);
        multiply(&mut lowering, stage, rows);
    }
    lowering.p.finish()
}

/// Lowers one rank's backward of layers that share `x`: inputs `dy_0`, `weight_0` and so on and, unless weights are frozen, `x`; outputs
/// `dx`, the sum of what all layers give, and of each layer what `gradient` says, by its number (`dweight_0`, `dbias_0`, or `main_grad_0`
/// and `main_grad_bias_0`, or `kept` under sequence parallelism where they are deferred). What layers give is added on each rank in a type
/// in which sums lose nothing, and summed over ranks once.
///
/// # Panics
/// For [`InputGradient::Partial`] under sequence parallelism.
pub fn lower_shared_input_backward(
    layers: SharedInput<'_>,
    rank: usize,
    (gradient, input): (WeightGradient, InputGradient),
    policy: OverlapPolicy,
) -> Program {
    let plan = layers.plan;
    let is_partial = input == InputGradient::Partial;
    let sequence_parallel = plan.spec.activations == Activations::SequenceParallel;
    assert!(!(is_partial && sequence_parallel), "each rank has its own tokens' gradients only");
    let mut p = ProgramBuilder::new("shared input backward", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    let (tokens, columns) = (plan.spec.tokens, plan.spec.in_features);
    let mut parts = Vec::new();
    for (at, &features) in layers.outputs.iter().enumerate() {
        let dy = lowering.input(&format!("dy_{at}"), &[tokens, features]);
        let weight = lowering.input(&format!("weight_{at}"), &[features, columns]);
        parts.push(Part { features, dy, weight });
    }
    let is_frozen = gradient == WeightGradient::Frozen;
    let local = lowering.local_tokens();
    let x = (!is_frozen).then(|| lowering.input("x", &[local, columns]));
    let behind = plan.tp_size > 1 && lowering.p.policy().leaves_workers();
    let mut inputs = None;
    if let Some(x) = x.filter(|_| !behind) {
        inputs = Some(gather_all(&mut lowering, x, columns, gradient));
    }
    let mut sums = None;
    if plan.tp_size == 1 || is_partial {
        alone(&mut lowering, &parts);
    } else {
        let follows = !matches!(gradient, WeightGradient::Frozen | WeightGradient::Deferred);
        let under = if follows { SpreadUnder::Following } else { SpreadUnder::Product };
        let mut reduced = ReducedTokens::new(&mut lowering, "dx", columns, BufferRole::Output, under);
        let share_dtype = sum_dtype(&lowering, &parts);
        let of_pass = reduced.parts();
        for part in &of_pass {
            if part.number > 0 {
                reduced.after_start(&mut lowering, part.number);
            }
            let share = reduced.partial(&mut lowering, part, share_dtype);
            let mut gemms = products(&lowering, &parts, share, |dy| group_rows(plan, part.group, dy));
            gemms.iter_mut().for_each(|gemm| gemm.columns = part.columns);
            reduced.compute(&mut lowering, part, "dx", gemms);
        }
        reduced.after_start(&mut lowering, of_pass.len());
        sums = Some(reduced);
    }
    if let Some(x) = x.filter(|_| behind) {
        inputs = Some(gather_all(&mut lowering, x, columns, gradient));
    }
    if let Some(sums) = &mut sums {
        sums.mark(&mut lowering);
    }
    if let Some(x) = inputs {
        let blocks = x.enter(&mut lowering);
        for (at, part) in parts.iter().enumerate() {
            weight_gradient(&mut lowering, gradient, &blocks, at, (part.features, part.dy));
        }
    }
    if let Some(sums) = sums {
        sums.finish(&mut lowering);
    }
    lowering.p.finish()
}

/// Lowers one rank's gradients of the weights, left out by a backward under [`WeightGradient::Deferred`]: inputs are that backward's
/// `dy_0` and so on, and its `x` or what it has `kept` of it. `main_grad` is the type of what is added to, `None` to write `dweight_0`
/// and so on.
pub fn lower_shared_input_weight_gradient(
    layers: SharedInput<'_>,
    rank: usize,
    main_grad: Option<DType>,
    policy: OverlapPolicy,
) -> Program {
    let plan = layers.plan;
    let mut p = ProgramBuilder::new("shared input weight gradient", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let mut lowering = Lowering { p, plan, rank, compute };
    let gradient = main_grad.map_or(WeightGradient::Written, WeightGradient::Accumulated);
    let (tokens, columns) = (plan.spec.tokens, plan.spec.in_features);
    let name = if lowering.gathers() { KEPT } else { "x" };
    let x = lowering.input(name, &[tokens, columns]);
    let x = lowering.whole(x, tokens);
    for (at, &features) in layers.outputs.iter().enumerate() {
        let dy = lowering.input(&format!("dy_{at}"), &[tokens, features]);
        weight_gradient(&mut lowering, gradient, &x, at, (features, dy));
    }
    lowering.p.finish()
}

/// One of the layers.
struct Part {
    features: usize,
    dy: BufferId,
    weight: BufferId,
}

/// The type in which what layers give is added up on a rank.
fn sum_dtype(lowering: &Lowering<'_>, parts: &[Part]) -> DType {
    let dtype = lowering.plan.spec.dtype;
    if parts.len() > 1 { dtype.accumulator() } else { dtype }
}

/// `out = dy_0 W_0 + dy_1 W_1 + ...` of some rows.
fn products(
    lowering: &Lowering<'_>,
    parts: &[Part],
    out: BufferId,
    rows: impl Fn(BufferId) -> (Vec<RowBlock>, Vec<Range>),
) -> Vec<Gemm> {
    let product = |(index, part): (usize, &Part)| {
        let (a, out_rows) = rows(part.dy);
        Gemm {
            layout: GemmLayout::Nn,
            a: a.into(),
            b: lowering.whole(part.weight, part.features).into(),
            out,
            out_rows: out_rows.into(),
            pass_rows: lowering.plan.spec.tokens,
            columns: None,
            bias: None,
            accumulate: if index == 0 { Accumulate::Start } else { Accumulate::Continue },
        }
    };
    parts.iter().enumerate().map(product).collect()
}

/// `dx` of a rank that sums it with nobody.
fn alone(lowering: &mut Lowering<'_>, parts: &[Part]) {
    let (tokens, dtype) = (lowering.plan.spec.tokens, lowering.plan.spec.dtype);
    let shape = [tokens, lowering.plan.spec.in_features];
    let sum_dtype = sum_dtype(lowering, parts);
    let dx = lowering.p.buffer("dx", dtype, &shape, BufferRole::Output);
    let sum = match sum_dtype == dtype {
        true => dx,
        false => lowering.p.buffer("dx_sum", sum_dtype, &shape, BufferRole::Scratch),
    };
    let all = |dy: BufferId| {
        let rows = Range::new(0, tokens);
        (vec![RowBlock { buffer: dy, rows }], vec![rows])
    };
    for gemm in products(lowering, parts, sum, all) {
        lowering.p.push(lowering.compute, Some(0), "dx", Op::Gemm(gemm));
    }
    if sum != dx {
        lowering.p.push(lowering.compute, Some(0), "dx", Op::Cast { src: sum, dst: dx });
    }
}

/// `dW = dy^T x` of a layer and the sums of its `dy`'s columns, written or added.
fn weight_gradient(
    lowering: &mut Lowering<'_>,
    gradient: WeightGradient,
    x: &[RowBlock],
    at: usize,
    (features, dy): (usize, BufferId),
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
    let names = names.map(|name| format!("{name}_{at}"));
    let out = lowering.p.buffer(&names[0], dtype, &[features, plan.spec.in_features], role);
    let bias = plan.spec.has_bias.then(|| lowering.p.buffer(&names[1], dtype, &[features], role));
    let dy = lowering.whole(dy, plan.spec.tokens);
    let op = Gemm {
        layout: GemmLayout::Tn,
        a: dy.clone().into(),
        b: x.to_vec().into(),
        out,
        out_rows: vec![Range::new(0, features)].into(),
        pass_rows: features,
        columns: None,
        bias: None,
        accumulate,
    };
    lowering.p.push(lowering.compute, None, LayerPart::WeightGradient.label(), Op::Gemm(op));
    if let Some(dst) = bias {
        let sum = Op::ColumnSum(ColumnSum { src: dy, dst, accumulate });
        lowering.p.push(lowering.compute, None, LayerPart::BiasGradient.label(), sum);
    }
}
