//! Products whose rows go to the ranks that own their tokens, group by group while the rest is computed.

use counterpoint_exec::{
    Backend, CpuMachine, HostTensor, Machine, Prepared, World, WorldConfig, random_tensor,
};
use counterpoint_plan::{Activations, CostModel, DType, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_schedule::{OverlapPolicy, StartOrder, lower_product_all_to_all};

const RANKS: usize = 3;
const FEATURES: [usize; 2] = [7, 5];

fn inputs(rank: usize, tokens: usize) -> [HostTensor; 2] {
    let tensor = |rows, seed| random_tensor(vec![rows, FEATURES[0]], DType::F32, seed);
    [tensor(tokens, rank as u64), tensor(FEATURES[1], 50 + rank as u64)]
}

fn run(plan: &LinearPlan, policy: OverlapPolicy) -> Vec<HostTensor> {
    let machine = CpuMachine::new(0, None).unwrap();
    let world = World::new(RANKS, WorldConfig::default());
    let ends = machine.connect(&world).unwrap().into_iter().enumerate();
    let mut ranks: Vec<_> = ends
        .map(|(rank, (backend, transport))| {
            let program = lower_product_all_to_all(plan, rank, policy);
            let mut prepared = Prepared::new(program, backend, transport).unwrap();
            for (name, tensor) in ["x", "weight"].into_iter().zip(inputs(rank, plan.spec.tokens)) {
                let buffer = prepared.backend().upload(name, tensor).unwrap();
                prepared.bind(name, buffer).unwrap();
            }
            prepared
        })
        .collect();
    Prepared::run_ranks(&mut ranks).unwrap();
    ranks.iter().map(|rank| rank.backend().download(rank.buffer("y").unwrap()).unwrap()).collect()
}

/// Row by row, the definition; the same bits for all groups and policies, with tokens that do not divide.
#[test]
fn rows_go_home_while_the_rest_is_computed() {
    for tokens in [2, 3, 22, 64] {
        let spec = LinearSpec {
            kind: LinearKind::Column,
            activations: Activations::SequenceParallel,
            tokens,
            in_features: FEATURES[0],
            out_features: FEATURES[1] * RANKS,
            has_bias: false,
            dtype: DType::F32,
        };
        let plan = |groups| LinearPlan::new(spec, RANKS, groups, &CostModel::H200).unwrap();
        let whole = plan(WaveGroups::Fixed(1));
        let first = run(&whole, OverlapPolicy::new(StartOrder::Sequential));
        for (rank, y) in first.iter().enumerate() {
            let own = whole.tokens_of(rank);
            let mut expected = Vec::new();
            for from in 0..RANKS {
                let [x, weight] = inputs(from, tokens).map(|tensor| tensor.to_f64());
                for row in x.chunks(FEATURES[0]).take(own.end).skip(own.start) {
                    let dot = |w: &[f64]| row.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
                    expected.extend(weight.chunks(FEATURES[0]).map(dot));
                }
            }
            assert_eq!(y.len(), expected.len());
            assert!(
                y.to_f64().iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5),
                "{tokens} rank {rank}"
            );
        }
        for start in StartOrder::ALL {
            for groups in [2, 5] {
                let found = run(&plan(WaveGroups::Fixed(groups)), OverlapPolicy::new(start));
                assert_eq!(found, first, "{tokens} tokens, {groups} groups, {start:?}");
            }
        }
    }
}
