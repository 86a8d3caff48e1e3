//! Problems of more bytes than a 64-bit counter holds are refused; just below, no sum overflows.

use counterpoint_choose::{
    AttentionPrediction, DeviceModel, LayerGroups, Parallelism, PlanConfig, QueryExchange, StepError,
    StepSpec, attention_policies, plan_attention, plan_mask, plan_mask_on,
};
use counterpoint_cost::CostModel;
use counterpoint_mask::Mask;
use counterpoint_plan::{
    Activations, AttentionSpec, DType, LinearKind, LinearSpec, PlanError, Planning, Topology, TransformerSpec,
};
use counterpoint_schedule::{
    GradientReduction, OverlapPolicy, RankTransport, WeightGradient, lower_linear_backward,
    lower_linear_forward, simulate,
};

const HUGE: usize = 1 << 62;

/// The last of doubled sizes that is taken.
fn largest(taken: impl Fn(usize) -> Result<(), PlanError>) -> usize {
    let most = (0..63).map(|log| 1 << log).take_while(|size| taken(*size).is_ok()).last().unwrap();
    assert!(matches!(taken(2 * most), Err(PlanError::Bytes { .. })));
    most
}

#[test]
fn attention_that_nobody_could_count_is_refused() {
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    let (mask, config) = (Mask::causal(64).unwrap(), PlanConfig::new(4));
    let small = AttentionSpec::new(8, 8, 128, DType::Bf16);
    let base = plan_mask(&mask, &small, &config).unwrap();
    for spec in [
        AttentionSpec { heads_q: HUGE, ..small },
        AttentionSpec { heads_q: HUGE, heads_kv: HUGE, ..small },
        AttentionSpec { head_dim: usize::MAX, head_dim_v: usize::MAX, ..small },
        AttentionSpec { seqlen_sink: HUGE, ..small },
    ] {
        let planned = [
            plan_mask(&mask, &spec, &config),
            plan_mask(&Mask::cross_full(64, 32).unwrap(), &spec, &config),
            plan_mask_on(&base, &mask, &spec, &config, &Planning::ALONE),
            plan_attention(&mask, &spec, &config, model, u64::MAX, &Planning::ALONE).map(|(plan, _)| plan),
        ];
        for refused in planned {
            let text = refused.unwrap_err().to_string();
            assert!(text.contains("the tensors of 4 ranks together may have more than"), "{text}");
        }
    }
}

#[test]
fn every_sum_of_attention_that_is_taken_can_be_counted() {
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    let masks = [Mask::causal(1 << 10).unwrap(), Mask::cross_full(1 << 8, 1 << 30).unwrap()];
    for (mask, heads_kv, nodes) in masks.iter().flat_map(|mask| [(mask, 1, 1), (mask, 64, 2)]) {
        let ranks = 4;
        let rows = [mask.seqlen_q(), mask.seqlen_k()];
        let spec = |dim| AttentionSpec::new(64, heads_kv, dim, DType::F64);
        let spec = spec(largest(|dim| spec(dim).check_bytes(rows, ranks)));
        let topology = Topology { world_size: ranks, ranks_per_node: ranks / nodes };
        for query_exchange in [QueryExchange::Never, QueryExchange::Auto, QueryExchange::FewestBytes] {
            let config = PlanConfig { topology, query_exchange, ..PlanConfig::new(ranks) };
            let (plan, _) = plan_attention(mask, &spec, &config, model, u64::MAX, &Planning::ALONE).unwrap();
            let (cost, backward) = (CostModel::H200, Some(GradientReduction::default()));
            let transports = RankTransport::of_gpus(&topology);
            let choice =
                attention_policies(&plan, &spec, backward, transports, &topology, &cost, &Planning::ALONE);
            let policies = choice.unwrap().policies();
            AttentionPrediction::of(&plan, &spec, policies, backward, &topology, &cost).unwrap();
        }
    }
}

fn linear(kind: LinearKind, tokens: usize, features: usize) -> LinearSpec {
    let [in_features, out_features] = [features; 2];
    let activations = Activations::SequenceParallel;
    LinearSpec { kind, activations, tokens, in_features, out_features, has_bias: false, dtype: DType::F64 }
}

#[test]
fn linear_layers_are_refused_or_every_sum_can_be_counted() {
    let (tp_size, cost) = (8, CostModel::H200);
    for kind in [LinearKind::Column, LinearKind::Row] {
        for tokens in [64, 1 << 20] {
            let layer =
                |features: usize| LayerGroups::Auto.plan(linear(kind, tokens, 8 * features), tp_size, &cost);
            let plan = layer(largest(|features| layer(features).map(|_| ()))).unwrap();
            for policy in [OverlapPolicy::SEQUENTIAL, OverlapPolicy::FUSED] {
                let backward =
                    lower_linear_backward(&plan, 0, WeightGradient::Accumulated(DType::F32), policy);
                for program in [lower_linear_forward(&plan, 0, policy), backward] {
                    simulate(&[program], &Topology::flat(tp_size), &cost).unwrap();
                }
            }
        }
    }
}

#[test]
fn a_step_that_nobody_could_count_is_refused() {
    let sizes = TransformerSpec::LLAMA3_70B;
    for model in [
        TransformerSpec { hidden: HUGE, ..sizes },
        TransformerSpec { feed_forward: HUGE, ..sizes },
        TransformerSpec { heads_q: HUGE, ..sizes },
        TransformerSpec { heads_kv: HUGE, heads_q: HUGE, ..sizes },
        TransformerSpec { head_dim: HUGE, ..sizes },
        TransformerSpec { layers: HUGE, ..sizes },
    ] {
        let step = StepSpec {
            model,
            mask: Mask::causal(64).unwrap(),
            microbatches: 1,
            dtype: DType::Bf16,
            activations: Activations::SequenceParallel,
            gradient: WeightGradient::Accumulated(DType::F32),
            groups: LayerGroups::Auto,
            policy: OverlapPolicy::SEQUENTIAL,
        };
        let ranks = Parallelism { topology: Topology::flat(8), tp_size: 4, cp_size: 2 };
        let refused = step.layer(&ranks, &CostModel::H200).unwrap_err();
        assert!(matches!(refused, StepError::Plan(PlanError::Bytes { .. })), "{refused}");
    }
}
