//! Row-parallel layers with a residual and RMSNorm behind their sums: whatever groups the rows have travelled in, results are in order and
//! have the same bits.

use counterpoint_exec::{
    Backend, CpuBackend, CpuMachine, CpuTransport, HostTensor, Machine, Prepared, World, WorldConfig,
    random_tensor,
};
use counterpoint_plan::{Activations, CostModel, DType, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_schedule::{
    BufferRole, OverlapPolicy, StartOrder, lower_linear_forward, lower_normalised_forward,
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
            let plan =
                |groups| LinearPlan::new(spec(activations, dtype), RANKS, groups, &CostModel::H200).unwrap();
            let whole = plan(WaveGroups::Fixed(1));
            let sequential = OverlapPolicy::new(StartOrder::Sequential);
            let normalised = |plan: &LinearPlan, policy| {
                outputs(plan, |rank| lower_normalised_forward(plan, rank, EPSILON, policy), &["sum", "y"])
            };
            let first = normalised(&whole, sequential);
            let plain = outputs(&whole, |rank| lower_linear_forward(&whole, rank, sequential), &["y"]);
            for (rank, (found, plain)) in first.iter().zip(&plain).enumerate() {
                check(found, &plain[0], activations, rank, dtype);
            }
            let starts = StartOrder::ALL.map(OverlapPolicy::new);
            for policy in starts.into_iter().chain(["fused".parse().unwrap()]) {
                for groups in [WaveGroups::Fixed(2), WaveGroups::Sizes(vec![1, 4, 3])] {
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
