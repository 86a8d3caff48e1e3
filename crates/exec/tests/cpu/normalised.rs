//! Row-parallel layers with a residual and RMSNorm behind their sums: whatever groups the rows have travelled in, results are in order and
//! have the same bits.

use counterpoint_cost::CostModel;
use counterpoint_exec::{
    Backend, CpuBackend, CpuMachine, CpuTransport, Group, HostTensor, LayerGradient, LayerOverlap,
    LinearOptions, LinearTensor, Machine, Prepared, RowParallelLinearRmsNorm, World, WorldConfig,
    random_linear_inputs, random_tensor,
};
use counterpoint_plan::{Activations, DType, LinearKind, LinearPlan, LinearSize, LinearSpec, WaveGroups};
use counterpoint_reference::{NormalisedInputs, reference_normalised};
use counterpoint_schedule::{
    BufferRole, NormSpec, OverlapPolicy, StartOrder, lower_linear_forward, lower_normalised_forward,
};

const EPSILON: f64 = 1e-5;
const RANKS: usize = 3;
const FEATURES: usize = 12;

fn spec(activations: Activations, dtype: DType) -> LinearSpec {
    LinearSpec {
        kind: LinearKind::Row,
        activations,
        tokens: 22,
        in_features: 9,
        out_features: FEATURES,
        has_bias: true,
        dtype,
    }
}

/// The outputs of these names, of every rank.
fn outputs(
    plan: &LinearPlan,
    lower: impl Fn(usize) -> counterpoint_schedule::Program,
    names: &[&str],
) -> Vec<Vec<HostTensor>> {
    let machine = CpuMachine::new(0, None).unwrap();
    let world = World::new(plan.tp_size, WorldConfig::default());
    let ends = machine.connect(&world).unwrap().into_iter().enumerate();
    let mut ranks: Vec<_> = ends
        .map(|(rank, (backend, transport))| Prepared::new(lower(rank), backend, transport).unwrap())
        .collect();
    for (rank, prepared) in ranks.iter_mut().enumerate() {
        let inputs: Vec<_> = prepared
            .program()
            .buffers
            .iter()
            .filter(|spec| spec.role == BufferRole::Input)
            .cloned()
            .collect();
        for input in inputs {
            // What ranks share is the same on all of them.
            let own = match (input.name.as_str(), plan.spec.activations) {
                ("bias" | "norm_weight", _) | ("residual", Activations::Replicated) => 0,
                _ => rank as u64,
            };
            let seed = 100 * own + input.name.len() as u64;
            let tensor = random_tensor(input.shape.clone(), input.dtype, seed);
            let buffer = prepared.backend().upload(&input.name, tensor).unwrap();
            prepared.bind(&input.name, buffer).unwrap();
        }
    }
    Prepared::run_ranks(&mut ranks).unwrap();
    let of = |rank: &Prepared<CpuBackend, CpuTransport>, name: &str| {
        rank.backend().download(rank.buffer(name).unwrap()).unwrap()
    };
    ranks.iter().map(|rank| names.iter().map(|name| of(rank, name)).collect()).collect()
}

#[test]
fn rows_come_into_their_order_and_are_normalised() {
    for activations in [Activations::SequenceParallel, Activations::Replicated] {
        for dtype in [DType::F64, DType::F32, DType::Bf16] {
            let plan = |groups| LinearPlan::new(spec(activations, dtype), RANKS, groups).unwrap();
            let whole = plan(WaveGroups::Fixed(1));
            let sequential = OverlapPolicy::new(StartOrder::Sequential);
            let normalised = |plan: &LinearPlan, policy| {
                outputs(
                    plan,
                    |rank| lower_normalised_forward(plan, rank, NormSpec::new(EPSILON), policy),
                    &["sum", "y"],
                )
            };
            let first = normalised(&whole, sequential);
            let plain = outputs(&whole, |rank| lower_linear_forward(&whole, rank, sequential), &["y"]);
            for (rank, (found, plain)) in first.iter().zip(&plain).enumerate() {
                check(found, &plain[0], activations, rank, dtype);
            }
            let starts = StartOrder::ALL.map(OverlapPolicy::new);
            for policy in starts.into_iter().chain(["fused".parse().unwrap()]) {
                for groups in [WaveGroups::Fixed(2), WaveGroups::Sizes(vec![1, 4, 3]), WaveGroups::Columns(3)]
                {
                    let plan = plan(groups);
                    assert_eq!(
                        normalised(&plan, policy),
                        first,
                        "{activations:?} {dtype:?} {policy} {plan:?}"
                    );
                }
            }
        }
    }
}

/// Row by row, the definition in f64 of what the layer alone gives.
fn check(found: &[HostTensor], plain: &HostTensor, activations: Activations, rank: usize, dtype: DType) {
    let shape = plain.shape().to_vec();
    let own = if activations == Activations::Replicated { 0 } else { rank as u64 };
    let input = |name: &str, shape: Vec<usize>, own: u64| {
        random_tensor(shape, dtype, 100 * own + name.len() as u64).to_f64()
    };
    let (residual, weight) = (input("residual", shape, own), input("norm_weight", vec![FEATURES], 0));
    let [sum, y] = [&found[0], &found[1]].map(HostTensor::to_f64);
    let bound = match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 1e-6,
        DType::Bf16 | DType::F16 => 8e-3,
    };
    let expected: Vec<f64> = plain.to_f64().iter().zip(&residual).map(|(x, r)| x + r).collect();
    let close = |found: f64, right: f64| (found - right).abs() <= bound * (1.0 + right.abs());
    assert!(sum.iter().zip(&expected).all(|(found, right)| close(*found, *right)));
    for (h, y) in sum.chunks(FEATURES).zip(y.chunks(FEATURES)) {
        let mean = h.iter().map(|x| x * x).sum::<f64>() / FEATURES as f64;
        let scale = 1.0 / (mean + EPSILON).sqrt();
        assert!(y.iter().zip(h).zip(&weight).all(|((y, x), w)| close(*y, x * scale * w)), "{dtype:?}");
    }
}

/// What a layer gives, whole: `sum`, `y`, `dx`, the gradients of the residual, of the weight, of the bias and of the norm's weight.
fn of_layer(spec: LinearSpec, norm: NormSpec, policy: OverlapPolicy, groups: WaveGroups) -> Vec<HostTensor> {
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    let overlap = LayerOverlap::Policy(policy, groups.into(), CostModel::H200);
    let options = LinearOptions {
        activations: spec.activations,
        has_bias: spec.has_bias,
        gradient: LayerGradient::Written,
        overlap,
        ..LinearOptions::new(spec.dtype)
    };
    let mut layer = RowParallelLinearRmsNorm::new(&group, spec.size(), &options, norm).unwrap();
    let inputs = random_linear_inputs(&spec, None, 11, true);
    let whole = NormTensors::new(&spec);
    let scatter = |layer: &RowParallelLinearRmsNorm<_>, tensor, whole: &HostTensor| {
        layer.scatter(tensor, whole).unwrap()
    };
    let weight = scatter(&layer, LinearTensor::Weight, &inputs.weight);
    let bias = inputs.bias.as_ref().map(|bias| scatter(&layer, LinearTensor::Bias, bias));
    layer.bind_weight(&weight, bias.as_ref()).unwrap();
    if norm.has_weight {
        let weight = layer.scatter_norm_weight(&whole.norm_weight).unwrap();
        layer.bind_norm_weight(&weight).unwrap();
    }
    let x = scatter(&layer, LinearTensor::Input, &inputs.x);
    let dy = scatter(&layer, LinearTensor::Output, inputs.dy.as_ref().unwrap());
    let [residual, dsum] =
        [&whole.residual, &whole.dsum].map(|whole| scatter(&layer, LinearTensor::Output, whole));
    let if_residual = |tensor| norm.has_residual.then_some(tensor);
    let forward = layer.forward(&x, if_residual(&residual)).unwrap();
    let backward = layer.backward(&x, &forward.sum, &dy, if_residual(&dsum)).unwrap();
    let (dweight, dbias) = layer.weight_gradient().unwrap();
    let gather = |tensor, parts| layer.gather(tensor, parts).unwrap();
    let mut all = vec![
        gather(LinearTensor::Output, &forward.sum),
        gather(LinearTensor::Output, &forward.y),
        gather(LinearTensor::Input, &backward.dx),
        gather(LinearTensor::Output, &backward.dresidual),
        gather(LinearTensor::Weight, &dweight),
        gather(LinearTensor::Bias, &dbias.unwrap()),
    ];
    if let Some(parts) = &backward.dnorm_weight {
        // Of each rank's own tokens, or of all.
        let ranks = if spec.activations == Activations::Replicated { 1 } else { RANKS };
        let parts = layer.download(parts).unwrap();
        let summed = parts[..ranks].iter().map(HostTensor::to_f64).reduce(|mut sum, part| {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            sum
        });
        all.push(HostTensor::from_vec(vec![FEATURES], summed.unwrap()));
    }
    all
}

/// What such a layer has besides a layer's own tensors.
struct NormTensors {
    residual: HostTensor,
    dsum: HostTensor,
    norm_weight: HostTensor,
}

impl NormTensors {
    fn new(spec: &LinearSpec) -> Self {
        let tensor = |shape: &[usize], seed| random_tensor(shape.to_vec(), spec.dtype, seed);
        let rows = [spec.tokens, spec.out_features];
        Self {
            residual: tensor(&rows, 21),
            dsum: tensor(&rows, 22),
            norm_weight: tensor(&[spec.out_features], 23),
        }
    }
}

#[test]
fn layers_and_their_gradients_are_those_of_the_definition() {
    let sequential = OverlapPolicy::new(StartOrder::Sequential);
    for activations in [Activations::SequenceParallel, Activations::Replicated] {
        for (dtype, bound) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::Bf16, 2e-2)] {
            for (has_residual, has_weight) in [(true, true), (true, false), (false, true), (false, false)] {
                let spec = spec(activations, dtype);
                let norm = NormSpec { epsilon: EPSILON, has_residual, has_weight };
                let found = of_layer(spec, norm, sequential, WaveGroups::Fixed(1));
                let linear = random_linear_inputs(&spec, None, 11, true);
                let tensors = NormTensors::new(&spec);
                let inputs = NormalisedInputs {
                    linear: &linear,
                    residual: has_residual.then_some(&tensors.residual),
                    norm_weight: has_weight.then_some(&tensors.norm_weight),
                    dsum: has_residual.then_some(&tensors.dsum),
                };
                let right = reference_normalised(&inputs, &norm);
                let right = [
                    right.sum,
                    right.y,
                    right.dx,
                    right.dsum,
                    right.dweight,
                    right.dbias,
                    right.dnorm_weight,
                ];
                assert_eq!(found.len(), 6 + usize::from(has_weight));
                for (at, (found, right)) in found.iter().zip(&right).enumerate() {
                    let found = found.to_f64();
                    let length = right.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let apart = found.iter().zip(right).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
                    assert!(
                        apart <= bound * length,
                        "{at} {activations:?} {dtype:?} {norm:?}: {apart} of {length}"
                    );
                }
                let policies = StartOrder::ALL.map(OverlapPolicy::new).into_iter();
                for policy in policies.chain(["fused".parse().unwrap()]) {
                    let overlapped = of_layer(spec, norm, policy, WaveGroups::Sizes(vec![1, 4, 3]));
                    assert_eq!(overlapped, found, "{activations:?} {dtype:?} {norm:?} {policy}");
                }
            }
        }
    }
}

#[test]
fn what_a_norm_cannot_be_is_refused_in_a_sentence() {
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    let options = LinearOptions::new(DType::F32);
    let size = LinearSize { tokens: 22, in_features: 9, out_features: FEATURES };
    let refused = |options: &LinearOptions, norm| {
        let made = RowParallelLinearRmsNorm::new(&group, size, options, norm);
        made.map(|_| ()).unwrap_err().to_string()
    };
    for epsilon in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(refused(&options, NormSpec::new(epsilon)).contains("epsilon"));
    }
    let deferred = LayerGradient::Deferred { into: None, limit: 1 };
    let deferred = LinearOptions { gradient: deferred, ..options.clone() };
    assert!(refused(&deferred, NormSpec::new(EPSILON)).contains("not deferred behind an RMSNorm"));

    let norm = NormSpec { has_residual: false, ..NormSpec::new(EPSILON) };
    let mut layer = RowParallelLinearRmsNorm::new(&group, size, &options, norm).unwrap();
    let rows = HostTensor::zeros(vec![22, FEATURES], DType::F32);
    let rows = layer.scatter(LinearTensor::Output, &rows).unwrap();
    let x = layer.scatter(LinearTensor::Input, &HostTensor::zeros(vec![22, 9], DType::F32)).unwrap();
    let error = |found: Result<(), counterpoint_exec::ExecError>| found.unwrap_err().to_string();
    let forward = layer.forward(&x, Some(&rows)).map(|_| ());
    assert!(error(forward).contains("residual"));
    let backward = layer.backward(&x, &rows, &rows, Some(&rows)).map(|_| ());
    assert!(error(backward).contains("dsum"));
    let long = HostTensor::zeros(vec![FEATURES + 1], DType::F32);
    assert!(error(layer.scatter_norm_weight(&long).map(|_| ())).contains("norm_weight"));
    let unbound = layer.forward(&x, None).map(|_| ());
    assert!(error(unbound).contains("weight"));
}
