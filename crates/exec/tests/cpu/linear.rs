//! Tensor-parallel linear layers on CPU ranks, against the definition in f64 and against themselves.

use std::time::Duration;

use counterpoint_exec::{
    ExecError, FaultInjection, FaultKind, FaultPoint, HostTensor, LinearConfig, LinearInputs, LinearRun,
    RunConfig, SlowLink, run_linear,
};
use counterpoint_plan::{Activations, DType, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_schedule::{OverlapPolicy, SpanKind, StartOrder, Timeline, WeightGradient};
use half::{bf16, f16};
use proptest::prelude::*;

fn tensor(shape: &[usize], dtype: DType, seed: u64) -> HostTensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f64> = (0..shape.iter().product::<usize>())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        })
        .collect();
    of(shape, dtype, &values)
}

fn of(shape: &[usize], dtype: DType, values: &[f64]) -> HostTensor {
    let shape = shape.to_vec();
    match dtype {
        DType::F64 => HostTensor::from_vec(shape, values.to_vec()),
        DType::F32 => HostTensor::from_vec(shape, values.iter().map(|&x| x as f32).collect::<Vec<f32>>()),
        DType::Bf16 => {
            HostTensor::from_vec(shape, values.iter().map(|&x| bf16::from_f64(x)).collect::<Vec<bf16>>())
        }
        DType::F16 => {
            HostTensor::from_vec(shape, values.iter().map(|&x| f16::from_f64(x)).collect::<Vec<f16>>())
        }
    }
}

fn inputs(spec: &LinearSpec, main_grad: Option<DType>, seed: u64) -> LinearInputs {
    let LinearSpec { tokens, in_features, out_features, dtype, .. } = *spec;
    let bias = |dtype, seed| spec.has_bias.then(|| tensor(&[out_features], dtype, seed));
    LinearInputs {
        x: tensor(&[tokens, in_features], dtype, seed),
        weight: tensor(&[out_features, in_features], dtype, seed + 1),
        bias: bias(dtype, seed + 2),
        dy: Some(tensor(&[tokens, out_features], dtype, seed + 3)),
        main_grad: main_grad
            .map(|dtype| (tensor(&[out_features, in_features], dtype, seed + 4), bias(dtype, seed + 5))),
    }
}

/// y, dx, dweight, dbias in f64, by the definition.
fn expected(spec: &LinearSpec, inputs: &LinearInputs) -> [Vec<f64>; 4] {
    let LinearSpec { tokens, in_features: k, out_features: n, .. } = *spec;
    let (x, w) = (inputs.x.to_f64(), inputs.weight.to_f64());
    let dy = inputs.dy.as_ref().unwrap().to_f64();
    let bias = inputs.bias.as_ref().map(HostTensor::to_f64);
    let mut y = vec![0.0; tokens * n];
    let mut dx = vec![0.0; tokens * k];
    let (mut dw, mut db) = match &inputs.main_grad {
        Some((weight, bias)) => {
            (weight.to_f64(), bias.as_ref().map_or_else(|| vec![0.0; n], HostTensor::to_f64))
        }
        None => (vec![0.0; n * k], vec![0.0; n]),
    };
    for t in 0..tokens {
        for j in 0..n {
            y[t * n + j] = bias.as_ref().map_or(0.0, |bias| bias[j]);
            db[j] += dy[t * n + j];
            for i in 0..k {
                y[t * n + j] += x[t * k + i] * w[j * k + i];
                dx[t * k + i] += dy[t * n + j] * w[j * k + i];
                dw[j * k + i] += dy[t * n + j] * x[t * k + i];
            }
        }
    }
    [y, dx, dw, db]
}

fn config(gradient: WeightGradient, start: StartOrder) -> LinearConfig {
    let policy = OverlapPolicy { start, ..OverlapPolicy::default() };
    LinearConfig {
        weight_gradient: gradient,
        run: RunConfig { policy: policy.into(), ..RunConfig::default() }
            .with_poison(true)
            .with_limit(Duration::from_secs(60)),
    }
}

fn plan(spec: LinearSpec, tp_size: usize, groups: usize) -> LinearPlan {
    LinearPlan::new(spec, tp_size, WaveGroups::Fixed(groups)).unwrap()
}

/// Sizes of at least 1 that add up to `rows`, as near to the weights as they come.
fn in_proportion(rows: usize, weights: &[usize]) -> Vec<usize> {
    let total: usize = weights.iter().sum();
    let ends = weights.iter().scan(0, |sum, weight| {
        *sum += weight;
        Some(*sum * rows / total)
    });
    let mut start = 0;
    let sizes = ends.map(|end| end - std::mem::replace(&mut start, end));
    sizes.filter(|size| *size > 0).collect()
}

fn run(plan: &LinearPlan, inputs: &LinearInputs, config: &LinearConfig) -> LinearRun {
    run_linear(plan, inputs, config).unwrap_or_else(|error| panic!("{plan:?}: {error}"))
}

fn close(name: &str, found: &HostTensor, expected: &[f64], bound: f64) {
    let found = found.to_f64();
    assert_eq!(found.len(), expected.len(), "{name}");
    let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
    let error = found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
    assert!(error <= bound * norm.max(1e-3), "{name}: {error:e} of {norm:e}");
}

fn layer() -> impl Strategy<Value = (LinearSpec, usize)> {
    (
        prop_oneof![Just(LinearKind::Column), Just(LinearKind::Row)],
        prop_oneof![Just(Activations::Replicated), Just(Activations::SequenceParallel)],
        1usize..40,
        (1usize..5, 1usize..5),
        1usize..5,
        any::<bool>(),
        prop_oneof![Just(DType::F64), Just(DType::F32), Just(DType::Bf16), Just(DType::F16)],
    )
        .prop_map(|(kind, activations, tokens, (a, b), tp_size, has_bias, dtype)| {
            let (in_features, out_features) = match kind {
                LinearKind::Column => (3 * a, 2 * b * tp_size),
                LinearKind::Row => (2 * a * tp_size, 3 * b),
            };
            let spec = LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype };
            (spec, tp_size)
        })
}

fn gradients() -> impl Strategy<Value = (WeightGradient, bool)> {
    // The second: whether there is something to add to, in the accumulator type.
    prop_oneof![
        Just((WeightGradient::Frozen, false)),
        Just((WeightGradient::Written, false)),
        Just((WeightGradient::Deferred, false)),
        Just((WeightGradient::Deferred, true)),
        Just((WeightGradient::Accumulated(DType::F32), true)),
        Just((WeightGradient::Replaced(DType::F32), true)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Both kinds, with and without sequence parallelism, tokens that do not divide or are fewer than ranks, any groups of tokens or of
    /// columns, policies, types, biases and fates of the gradient of the weight.
    #[test]
    fn layers_are_what_they_are_defined_to_be(
        (spec, tp_size) in layer(),
        groups in 1usize..6,
        in_columns in any::<bool>(),
        order in 0usize..4,
        (gradient, adds) in gradients(),
        seed in 0u64..1000,
    ) {
        let acc = spec.dtype.accumulator();
        let gradient = match gradient {
            WeightGradient::Accumulated(_) => WeightGradient::Accumulated(acc),
            WeightGradient::Replaced(_) => WeightGradient::Replaced(acc),
            other => other,
        };
        let inputs = inputs(&spec, adds.then_some(acc), seed);
        let groups = if in_columns { WaveGroups::Columns(groups) } else { WaveGroups::Fixed(groups) };
        let plan = LinearPlan::new(spec, tp_size, groups).unwrap();
        let run = run(&plan, &inputs, &config(gradient, StartOrder::ALL[order]));
        let replaces = matches!(gradient, WeightGradient::Replaced(_));
        let added_to = inputs.main_grad.clone().filter(|_| !replaces);
        let [y, dx, dw, db] = expected(&spec, &LinearInputs { main_grad: added_to, ..inputs.clone() });
        // Partial sums are rounded before they are summed.
        let bound = match spec.dtype {
            DType::F64 => 1e-14,
            DType::F32 => 1e-5,
            DType::Bf16 => 1.5e-2,
            DType::F16 => 2e-3,
        };
        let outputs = &run.outputs;
        close("y", &outputs.y, &y, bound);
        close("dx", outputs.dx.as_ref().unwrap(), &dx, bound);
        if gradient == WeightGradient::Frozen {
            prop_assert!(outputs.dweight.is_none() && outputs.dbias.is_none());
        } else {
            close("dweight", outputs.dweight.as_ref().unwrap(), &dw, bound);
            prop_assert_eq!(outputs.dbias.is_some(), spec.has_bias);
            if let Some(dbias) = &outputs.dbias {
                close("dbias", dbias, &db, bound);
            }
        }
        prop_assert_eq!(run.weight_gradient.is_some(), gradient == WeightGradient::Deferred);
    }

    /// Groups of tokens or columns of any sizes, policies and delays change no bit, nor does deferring the gradient of the weight.
    #[test]
    fn results_have_the_same_bits_however_they_are_overlapped(
        (spec, tp_size) in layer(),
        weights in proptest::collection::vec(1usize..8, 2..6),
        delay in 0u64..3,
        first in 0usize..3,
    ) {
        let inputs = inputs(&spec, None, 7);
        let quiet = run(&plan(spec, tp_size, 1), &inputs, &config(WeightGradient::Written, StartOrder::Sequential));
        let sizes = WaveGroups::Sizes(in_proportion(spec.tokens.div_ceil(tp_size), &weights));
        let columns = WaveGroups::ColumnSizes(in_proportion(spec.travelling_columns(), &weights));
        let grouped = [sizes, columns].map(|groups| LinearPlan::new(spec, tp_size, groups).unwrap());
        let fused = ["fused", "kernel-barrier+fused"].map(|policy| policy.parse().unwrap());
        // Each policy with one of these, another in the next case.
        let gradients = [WeightGradient::Written, WeightGradient::Deferred, WeightGradient::Frozen];
        let gradients = gradients.into_iter().cycle().skip(first);
        let policies = StartOrder::ALL.map(OverlapPolicy::new).into_iter().chain(fused);
        let ways = policies.flat_map(|policy| grouped.iter().map(move |plan| (policy, plan)));
        for ((policy, grouped), gradient) in ways.zip(gradients) {
            let mut config = config(gradient, policy.start);
            config.run.policy = policy.into();
            config.run.world.faults = (0..tp_size)
                .map(|rank| FaultInjection {
                    rank,
                    program: None,
                    at: FaultPoint::Op(rank),
                    kind: FaultKind::Stall(Duration::from_millis(delay * rank as u64)),
                })
                .collect();
            let other = run(grouped, &inputs, &config);
            let mut expected = quiet.outputs.clone();
            if gradient == WeightGradient::Frozen {
                (expected.dweight, expected.dbias) = (None, None);
            }
            prop_assert_eq!(&other.outputs, &expected, "{:?} {:?} {:?}", grouped, policy, gradient);
        }
    }
}

/// The gradients are those of the forward: finite differences of `sum(y dy)` in every direction of a small layer.
#[test]
fn gradients_are_those_of_the_forward() {
    for kind in [LinearKind::Column, LinearKind::Row] {
        let spec = LinearSpec {
            kind,
            activations: Activations::SequenceParallel,
            tokens: 5,
            in_features: 4,
            out_features: 6,
            has_bias: true,
            dtype: DType::F64,
        };
        let plan = plan(spec, 2, 2);
        let config = config(WeightGradient::Written, StartOrder::Concurrent);
        let given = inputs(&spec, None, 3);
        let dy = given.dy.as_ref().unwrap().to_f64();
        let outputs = run(&plan, &given, &config).outputs;
        let loss = |inputs: &LinearInputs| -> f64 {
            let forward = LinearInputs { dy: None, ..inputs.clone() };
            run(&plan, &forward, &config).outputs.y.to_f64().iter().zip(&dy).map(|(y, dy)| y * dy).sum()
        };
        type Pick = fn(&mut LinearInputs) -> &mut HostTensor;
        let pairs: [(Pick, &HostTensor); 3] = [
            (|inputs| &mut inputs.x, outputs.dx.as_ref().unwrap()),
            (|inputs| &mut inputs.weight, outputs.dweight.as_ref().unwrap()),
            (|inputs| inputs.bias.as_mut().unwrap(), outputs.dbias.as_ref().unwrap()),
        ];
        for (pick, gradient) in pairs {
            for (at, &slope) in gradient.to_f64().iter().enumerate() {
                let moved = |step: f64| {
                    let mut inputs = given.clone();
                    pick(&mut inputs).as_mut_slice::<f64>().unwrap()[at] += step;
                    loss(&inputs)
                };
                let found = (moved(1e-3) - moved(-1e-3)) / 2e-3;
                assert!((found - slope).abs() < 1e-9, "{kind:?} {at}: {found} and {slope}");
            }
        }
    }
}

/// Over an imitated link the sums of dx travel under the products, as under the weight's gradient.
#[test]
fn communication_runs_under_the_products() {
    let spec = LinearSpec {
        kind: LinearKind::Column,
        activations: Activations::Replicated,
        tokens: 1024,
        in_features: 512,
        out_features: 1024,
        has_bias: false,
        dtype: DType::F32,
    };
    let given = inputs(&spec, None, 1);
    let backward = |start| {
        let mut config = config(WeightGradient::Written, start);
        config.run.world.poison = false;
        config.run.measurement.warmups = 0;
        config.run.slow_link =
            Some(SlowLink { alpha: Duration::from_millis(1), bytes_per_second: 1e8, network: None });
        let run = run(&plan(spec, 2, 4), &given, &config);
        run.backward.expect("there is a dy")
    };
    let sequential = backward(StartOrder::Sequential);
    assert!(sequential.overlap().efficiency.unwrap_or(0.0) < 0.05);
    let overlapped = backward(StartOrder::Concurrent).overlap();
    assert!(overlapped.efficiency.unwrap() > 0.5, "{overlapped:?}");
}

/// Two tokens of each rank: sums of groups of columns travel under the rest of the one kernel that computes all.
#[test]
fn a_link_is_hidden_under_columns_of_few_rows() {
    let spec = LinearSpec {
        kind: LinearKind::Row,
        activations: Activations::SequenceParallel,
        tokens: 4,
        in_features: 8192,
        out_features: 2048,
        has_bias: false,
        dtype: DType::F32,
    };
    let given = LinearInputs { dy: None, ..inputs(&spec, None, 1) };
    let forward = |start, groups| {
        let mut config = config(WeightGradient::Frozen, start);
        config.run = config.run.with_poison(false);
        config.run.measurement.warmups = 1;
        config.run.slow_link =
            Some(SlowLink { alpha: Duration::from_micros(100), bytes_per_second: 4e6, network: None });
        let plan = LinearPlan::new(spec, 2, groups).unwrap();
        let run = run(&plan, &given, &config);
        (run.forward.overlap().efficiency.unwrap_or(0.0), run.outputs.y)
    };
    let (none, y) = forward(StartOrder::Signals, WaveGroups::Fixed(1));
    let (some, in_columns) = forward(StartOrder::Signals, WaveGroups::Columns(8));
    assert_eq!(y, in_columns);
    assert!(none < 0.05 && some > 0.4, "{none} of tokens, {some} of columns");
}

/// Column forwards and row backwards under sequence parallelism: one product takes groups of rows as they arrive over an imitated link, and
/// waits only where it is ahead of them.
#[test]
fn rows_are_multiplied_as_they_arrive() {
    let spec = |kind| LinearSpec {
        kind,
        activations: Activations::SequenceParallel,
        tokens: 256,
        in_features: 512,
        out_features: 512,
        has_bias: false,
        dtype: DType::F32,
    };
    for kind in [LinearKind::Column, LinearKind::Row] {
        let given = inputs(&spec(kind), None, 1);
        let pass = |start, groups| {
            let mut config = config(WeightGradient::Frozen, start);
            config.run = config.run.with_poison(false);
            // A group of four takes 16 ms, far more than its product.
            config.run.slow_link =
                Some(SlowLink { alpha: Duration::from_millis(8), bytes_per_second: 8e6, network: None });
            let run = run(&plan(spec(kind), 2, groups), &given, &config);
            let timeline = if kind == LinearKind::Column { run.forward } else { run.backward.unwrap() };
            (timeline, run.outputs)
        };
        let (_, sequential) = pass(StartOrder::Sequential, 1);
        let label = if kind == LinearKind::Column { "y" } else { "dx" };
        // On a machine so busy that a product takes longer than its group, more of them are one; another run shows it.
        let found: Vec<String> = (0..5)
            .map_while(|_| {
                let (timeline, outputs) = pass(StartOrder::Signals, 4);
                assert_eq!(outputs, sequential);
                let taken = (0..2).all(|rank| takes_groups_as_they_arrive(&timeline, rank, label));
                (!taken).then(|| format!("{timeline:?}"))
            })
            .collect();
        assert!(found.len() < 5, "{kind}: {found:?}");
    }
}

/// Whether a rank's own rows are done before any others are there, and each of four groups' product between the end of its gather and that
/// of the next.
fn takes_groups_as_they_arrive(timeline: &Timeline, rank: usize, label: &str) -> bool {
    let of = |label: &str, kind: SpanKind| {
        let spans = timeline.spans.iter().filter(|span| (span.rank, span.kind) == (rank, kind));
        let mut spans: Vec<_> = spans.filter(|span| span.label == label).collect();
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        spans
    };
    let (products, waits) = (of(label, SpanKind::Compute), of(label, SpanKind::Wait));
    let gathers = of("all-gather", SpanKind::Communication);
    (products.len(), waits.len(), gathers.len()) == (5, 4, 4)
        && products[0].end < gathers[0].end
        && products[1..].iter().zip(&gathers).all(|(product, gather)| product.start >= gather.end)
        && products[3].start < gathers[3].end
}

/// A group that never comes: the product that waits for it says so once the limit is over.
#[test]
fn rows_that_never_arrive_are_named() {
    let spec = LinearSpec {
        kind: LinearKind::Column,
        activations: Activations::SequenceParallel,
        tokens: 64,
        in_features: 32,
        out_features: 32,
        has_bias: false,
        dtype: DType::F32,
    };
    let given = LinearInputs { dy: None, ..inputs(&spec, None, 1) };
    let mut config = config(WeightGradient::Frozen, StartOrder::Signals);
    config.run.world.limit = Duration::from_millis(300);
    let at = FaultPoint::Label { label: "tokens arrived".to_owned(), stage: Some(2) };
    let kind = FaultKind::Stall(Duration::from_secs(2));
    config.run.world.faults = vec![FaultInjection { rank: 1, program: None, at, kind }];
    let error = run_linear(&plan(spec, 2, 2), &given, &config).unwrap_err().to_string();
    for word in ["rank 1", "a signal of stream all-gather", "tokens arrived", "y"] {
        assert!(error.contains(word), "{word} in {error}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let spec = LinearSpec {
        kind: LinearKind::Row,
        activations: Activations::SequenceParallel,
        tokens: 8,
        in_features: 4,
        out_features: 6,
        has_bias: true,
        dtype: DType::F32,
    };
    let plan = plan(spec, 2, 1);
    let good = inputs(&spec, None, 1);
    let refused = |inputs: &LinearInputs, gradient, words: &[&str]| {
        let error = run_linear(&plan, inputs, &config(gradient, StartOrder::Concurrent)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ExecError::Tensor { .. }), "{text}");
        for word in words {
            assert!(text.contains(word), "{word} in {text}");
        }
    };
    let written = WeightGradient::Written;
    refused(
        &LinearInputs { x: tensor(&[8, 5], DType::F32, 1), ..good.clone() },
        written,
        &["x", "[8, 4]", "[8, 5]"],
    );
    refused(
        &LinearInputs { weight: tensor(&[6, 4], DType::Bf16, 1), ..good.clone() },
        written,
        &["weight", "f32"],
    );
    refused(&LinearInputs { bias: None, ..good.clone() }, written, &["bias", "missing"]);
    refused(&good, WeightGradient::Accumulated(DType::F32), &["main_grad", "missing"]);
    refused(&inputs(&spec, Some(DType::F32), 1), written, &["main_grad", "no use"]);
    let half = LinearInputs { ..inputs(&spec, Some(DType::Bf16), 1) };
    refused(&half, WeightGradient::Accumulated(DType::F32), &["main_grad", "f32", "bf16"]);
}
