//! Linear layers of all kinds: plans, the Programs of every pass, and results of some of them.

use counterpoint::choose::LayerGroups;
use counterpoint::cost::CostModel;
use counterpoint::exec::{LinearConfig, LinearInputs, LinearOutputs, RunConfig, run_linear};
use counterpoint::plan::{Activations, DType, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint::schedule::{
    NormSpec, OverlapPolicy, WeightGradient, lower_linear_backward, lower_linear_forward,
    lower_linear_weight_gradient, lower_normalised_forward,
};

use crate::case::{Case, DTYPES, POLICIES, dtype_name, on_cpu};
use crate::draw::Draw;
use crate::plan_text;
use crate::tensor::{Elements, bits, tensor};

/// Cases of linear layers.
pub(crate) const COUNT: usize = 96;
/// Of these, the ones from here on travel in groups of columns.
const IN_COLUMNS: usize = 90;
/// Of how many cases one is run.
const RUN_EVERY: usize = 3;

struct Layer {
    plan: LinearPlan,
    gradient: WeightGradient,
    policy: OverlapPolicy,
    text: String,
}

pub(crate) fn case(index: usize) -> Case {
    let layer = Layer::random(index);
    let Layer { plan, gradient, policy, text } = &layer;
    let mut case = Case::new(format!("linear {index:03}"), text.clone());
    case.part("plan", plan_text::linear_plan(plan));
    for rank in 0..plan.tp_size {
        let mut program = |pass: &str, program| {
            case.part(&format!("{pass} {rank}"), plan_text::program(&program));
        };
        program("forward", lower_linear_forward(plan, rank, *policy));
        program("backward", lower_linear_backward(plan, rank, *gradient, *policy));
        if *gradient == WeightGradient::Deferred {
            let main_grad = plan.spec.dtype.accumulator();
            program("weight gradient", lower_linear_weight_gradient(plan, rank, Some(main_grad), *policy));
        }
        if plan.spec.kind == LinearKind::Row {
            program("normalised forward", lower_normalised_forward(plan, rank, NormSpec::new(1e-5), *policy));
        }
    }
    if index.is_multiple_of(RUN_EVERY) {
        case.outputs_of_this_machine(|margin| layer.run(Elements::Real, index as u64, margin));
        case.outputs_of_any_machine(|margin| layer.run(Elements::Whole, index as u64, margin));
    }
    case
}

impl Layer {
    fn random(index: usize) -> Self {
        let mut draw = Draw::new(0x11ea_0000 + index as u64);
        let runs = index.is_multiple_of(RUN_EVERY);
        let tp_size = draw.pick(&[1, 2, 2, 3, 4, 4, 8]);
        let kind = draw.pick(&[LinearKind::Column, LinearKind::Row]);
        let activations = draw.pick(&[Activations::Replicated, Activations::SequenceParallel]);
        let tokens = if runs { draw.within(tp_size, 90) } else { draw.within(tp_size, 6000) };
        let (split, whole) = (tp_size * draw.within(1, 8), draw.within(1, 40));
        let (in_features, out_features) = match kind {
            LinearKind::Column => (whole, split),
            LinearKind::Row => (split, whole),
        };
        let dtype = DTYPES[index / RUN_EVERY % DTYPES.len()];
        let spec = LinearSpec {
            kind,
            activations,
            tokens,
            in_features,
            out_features,
            has_bias: draw.percent(40),
            dtype,
        };
        // A quarter leaves the groups to be chosen by predicted times.
        let groups = match draw.percent(25) {
            _ if index >= IN_COLUMNS => WaveGroups::Columns(draw.within(2, 4)).into(),
            true => LayerGroups::Auto,
            false => WaveGroups::Fixed(draw.within(1, 5)).into(),
        };
        let groups_text = match &groups {
            LayerGroups::Given(groups) => groups.to_string(),
            LayerGroups::Auto => "chosen".to_owned(),
        };
        let plan = groups.plan(spec, tp_size, &CostModel::H200).unwrap();
        let gradient = draw.pick(&[
            WeightGradient::Frozen,
            WeightGradient::Written,
            WeightGradient::Accumulated(DType::F32),
            WeightGradient::Deferred,
        ]);
        let gradient = match (gradient, dtype) {
            (WeightGradient::Accumulated(_), DType::F64) => WeightGradient::Accumulated(DType::F64),
            _ => gradient,
        };
        let policy_text = draw.pick(&POLICIES);
        let text = format!(
            "{} {}, {tokens}x{in_features}x{out_features} on {tp_size} ranks, {groups_text} groups, {}{}, weight \
             gradient {}, policy {policy_text}",
            match kind {
                LinearKind::Column => "column-parallel",
                LinearKind::Row => "row-parallel",
            },
            match activations {
                Activations::Replicated => "replicated",
                Activations::SequenceParallel => "sequence-parallel",
            },
            dtype_name(dtype),
            if spec.has_bias { ", bias" } else { "" },
            match gradient {
                WeightGradient::Frozen => "none",
                WeightGradient::Written => "written",
                WeightGradient::Accumulated(_) => "accumulated",
                WeightGradient::Replaced(_) => "replaced",
                WeightGradient::Deferred => "deferred",
            },
        );
        Self { plan, gradient, policy: policy_text.parse().unwrap(), text }
    }

    /// Bits of all results.
    fn run(&self, elements: Elements, seed: u64, margin: usize) -> String {
        let LinearSpec { tokens, in_features, out_features, has_bias, dtype, .. } = self.plan.spec;
        let make = |shape: &[usize], dtype, stream| tensor(shape, dtype, elements, seed * 16 + stream);
        let bias = |dtype, stream| has_bias.then(|| make(&[out_features], dtype, stream));
        let main_grad = match self.gradient {
            WeightGradient::Accumulated(dtype) | WeightGradient::Replaced(dtype) => Some(dtype),
            WeightGradient::Deferred => Some(dtype.accumulator()),
            WeightGradient::Frozen | WeightGradient::Written => None,
        };
        let inputs = LinearInputs {
            x: make(&[tokens, in_features], dtype, 0),
            weight: make(&[out_features, in_features], dtype, 1),
            bias: bias(dtype, 2),
            dy: Some(make(&[tokens, out_features], dtype, 3)),
            main_grad: main_grad.map(|dtype| (make(&[out_features, in_features], dtype, 4), bias(dtype, 5))),
        };
        let run = RunConfig { policy: on_cpu(self.policy, margin).into(), ..RunConfig::default() };
        let config = LinearConfig { weight_gradient: self.gradient, run };
        let LinearOutputs { y, dx, dweight, dbias } =
            run_linear(&self.plan, &inputs, &config).unwrap().outputs;
        let all = [("y", Some(y)), ("dx", dx), ("dweight", dweight), ("dbias", dbias)];
        all.iter().filter_map(|(name, tensor)| tensor.as_ref().map(|tensor| bits(name, tensor))).collect()
    }
}
