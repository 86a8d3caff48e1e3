//! What lowerings emit, as text: a change of a lowering is seen here before it is run. `INSTA_UPDATE=always cargo test -p
//! counterpoint-schedule --test snapshots` takes over what it emits now.

use std::sync::Arc;

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, QueryExchange, StageCount, plan_mask};
use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{
    Activations, AttentionSpec, DType, Division, ExpertGroups, ExpertKind, ExpertPlan, ExpertSpec,
    GemmCollective, HostedRows, LinearKind, LinearPlan, LinearSpec, Outline, Owners, Plan, Planning,
    RankOutline, Routing, RowHosts, StageCuts, Topology, WaveGroups,
};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, MatrixShape, NormSpec, OverlapPolicy, RankOf, WeightGradient,
    lower_attention_backward, lower_attention_forward, lower_collective, lower_expert_backward,
    lower_expert_forward, lower_linear_backward, lower_linear_forward, lower_linear_weight_gradient,
    lower_normalised_backward, lower_normalised_forward,
};

fn spec() -> AttentionSpec {
    AttentionSpec::new(4, 2, 64, DType::Bf16)
}

/// A causal mask of 512 rows in chunks of 64, dealt out in pairs.
fn config(cp_size: usize, stages: usize) -> PlanConfig {
    PlanConfig {
        chunk_size: Some(64),
        dispatch: DispatchAlgorithm::Zigzag,
        stages: StageCount::Fixed(stages).into(),
        ..PlanConfig::new(cp_size)
    }
}

fn plan(mask: &str, config: &PlanConfig) -> Plan {
    let mask: Mask = mask.parse().unwrap();
    plan_mask(&mask, &spec(), config).unwrap().over_nodes(&config.topology)
}

fn forward(plan: &Plan, policy: &str) -> String {
    let policy: OverlapPolicy = policy.parse().unwrap();
    lower_attention_forward(plan, 0, &spec(), policy, KeyBlocks::Unaligned).to_string()
}

fn backward(plan: &Plan, policy: &str, reduction: GradientReduction) -> String {
    let policy: OverlapPolicy = policy.parse().unwrap();
    lower_attention_backward(plan, 0, &spec(), policy, reduction).to_string()
}

#[test]
fn attention_on_one_rank() {
    let plan = plan("causal:512", &config(1, 1));
    insta::assert_snapshot!("attention_one_rank", forward(&plan, "concurrent"));
}

#[test]
fn attention_in_two_stages() {
    let plan = plan("causal:512", &config(2, 2));
    insta::assert_snapshot!("attention_forward_two_stages", forward(&plan, "kernel-barrier"));
    insta::assert_snapshot!(
        "attention_backward_two_stages",
        backward(&plan, "concurrent", GradientReduction::PerStage)
    );
    insta::assert_snapshot!(
        "attention_backward_deterministic",
        backward(&plan, "sequential", GradientReduction::Deterministic)
    );
}

#[test]
fn attention_whose_keys_arrive_while_it_computes() {
    let config = PlanConfig { chunk_size: Some(128), ..config(2, 0) };
    let plan = plan("causal:512", &config);
    insta::assert_snapshot!("attention_forward_arriving_keys", forward(&plan, "concurrent"));
    insta::assert_snapshot!(
        "attention_backward_arriving_keys",
        backward(&plan, "concurrent", GradientReduction::PerStage)
    );
}

#[test]
fn attention_on_two_nodes() {
    let config = PlanConfig { topology: Topology { world_size: 4, ranks_per_node: 2 }, ..config(4, 1) };
    insta::assert_snapshot!(
        "attention_forward_two_nodes",
        forward(&plan("causal:512", &config), "concurrent")
    );
}

#[test]
fn attention_with_query_offload() {
    let config = PlanConfig { query_exchange: QueryExchange::FewestBytes, ..config(2, 1) };
    let plan = plan("full:64,keys=1k", &config);
    assert!(plan.ranks[0].hosted.is_some());
    insta::assert_snapshot!("attention_forward_query_offload", forward(&plan, "concurrent"));
}

/// 64 rows on each of three ranks that see everything; rank 1 hosts the first rows of rank 0.
fn hosted_in_part() -> Plan {
    let mask: Mask = "full:192".parse().unwrap();
    let base = plan("full:192", &config(3, 1));
    let first = HostedRows { rows: Range::new(0, 16), hosts: RowHosts::These(vec![1]) };
    let division = Division::new(&mask, Owners::new(base.q_dispatch, base.k_dispatch));
    let division = division.with_hosts(&[vec![first], Vec::new(), Vec::new()]);
    let (owners, ranks) = RankOutline::of(division, &Topology::flat(3), |_, _| 1, &Planning::ALONE).unwrap();
    let places: Vec<Vec<usize>> = ranks.iter().map(|rank| vec![0, rank.remote.len()]).collect();
    let [forward, backward] = [(); 2].map(|()| StageCuts::new(&ranks, &places, 2));
    Outline { owners, ranks, forward, backward }.into_plan(&Planning::ALONE).unwrap()
}

#[test]
fn attention_with_rows_hosted_in_part() {
    let plan = hosted_in_part();
    insta::assert_snapshot!("attention_forward_hosted_in_part", forward(&plan, "concurrent"));
    insta::assert_snapshot!(
        "attention_backward_hosted_in_part",
        backward(&plan, "concurrent", GradientReduction::PerStage)
    );
}

fn layer(kind: LinearKind, activations: Activations) -> LinearPlan {
    let spec = LinearSpec {
        kind,
        activations,
        tokens: 512,
        in_features: 256,
        out_features: 384,
        has_bias: true,
        dtype: DType::Bf16,
    };
    LinearPlan::new(spec, 2, WaveGroups::Fixed(2)).unwrap()
}

fn linear(plan: &LinearPlan, policy: &str) -> String {
    lower_linear_forward(plan, 0, policy.parse().unwrap()).to_string()
}

#[test]
fn linear_layers() {
    let column = layer(LinearKind::Column, Activations::SequenceParallel);
    let row = layer(LinearKind::Row, Activations::SequenceParallel);
    let replicated = layer(LinearKind::Row, Activations::Replicated);
    insta::assert_snapshot!("linear_forward_column", linear(&column, "concurrent"));
    insta::assert_snapshot!("linear_forward_column_fused", linear(&column, "concurrent+fused"));
    insta::assert_snapshot!("linear_forward_row_signals", linear(&row, "signals"));
    insta::assert_snapshot!("linear_forward_column_signals", linear(&column, "signals"));
    let signals = "signals+sm-margin=16".parse().unwrap();
    let backward = lower_linear_backward(&row, 1, WeightGradient::Written, signals);
    insta::assert_snapshot!("linear_backward_row_signals", backward.to_string());
    insta::assert_snapshot!("linear_forward_row_fused", linear(&replicated, "concurrent+fused"));
    let policy = OverlapPolicy::default();
    let backward = lower_linear_backward(&column, 0, WeightGradient::Written, policy);
    insta::assert_snapshot!("linear_backward_column", backward.to_string());
    let deferred = lower_linear_weight_gradient(&row, 0, Some(DType::F32), policy);
    insta::assert_snapshot!("linear_weight_gradient_row", deferred.to_string());
    insta::assert_snapshot!(
        "linear_forward_normalised",
        lower_normalised_forward(&row, 0, NormSpec::new(1e-5), policy).to_string()
    );
    insta::assert_snapshot!(
        "linear_backward_normalised",
        lower_normalised_backward(&row, 0, NormSpec::new(1e-5), WeightGradient::Written, policy).to_string()
    );
}

#[test]
fn expert_layers() {
    // Expert 3 has no rows, one token has none of them, and another two on one rank.
    let ids = [vec![0, 1, 2, Routing::NO_EXPERT], vec![Routing::NO_EXPERT; 2]];
    let routing = Arc::new(Routing::top_k(4, 2, &ids).unwrap());
    let plan = |kind| {
        let spec = ExpertSpec { kind, in_features: 8, out_features: 16, dtype: DType::Bf16 };
        ExpertPlan::new(spec, routing.clone(), ExpertGroups::even(2))
    };
    let policy = OverlapPolicy::default();
    let (dispatch, combine) = (plan(ExpertKind::Dispatch), plan(ExpertKind::Combine));
    let forward = |plan, policy: &str| lower_expert_forward(plan, 1, policy.parse().unwrap()).to_string();
    insta::assert_snapshot!("expert_dispatch_forward", forward(&dispatch, "concurrent"));
    insta::assert_snapshot!("expert_combine_forward_signals", forward(&combine, "signals"));
    let backward = |plan, gradient| lower_expert_backward(plan, 1, gradient, policy).to_string();
    insta::assert_snapshot!("expert_dispatch_backward", backward(&dispatch, WeightGradient::Written));
    let accumulated = WeightGradient::Accumulated(DType::F32);
    insta::assert_snapshot!("expert_combine_backward", backward(&combine, accumulated));
}

#[test]
fn collectives() {
    let program = lower_collective(
        GemmCollective::AllReduce,
        RankOf { rank: 0, ranks: 2 },
        MatrixShape { rows: 64, columns: 128 },
        DType::Bf16,
    );
    insta::assert_snapshot!("all_reduce", program.to_string());
}

/// Long lists are cut, unless everything is asked for; identifiers that name nothing are written and do not panic.
#[test]
fn long_lists_and_wrong_programs() {
    let plan = plan("varlen-causal:lengths=40,50,60,70,80,90,100,22", &config(1, 1));
    let (policy, reduction) = (OverlapPolicy::default(), GradientReduction::PerStage);
    let mut program = lower_attention_backward(&plan, 0, &spec(), policy, reduction);
    let (short, long) = (program.to_string(), format!("{program:#}"));
    assert!(short.contains(" in all]") && !long.contains(" in all]"));
    assert_eq!(short.lines().count(), long.lines().count());
    program.buffers.clear();
    program.streams.clear();
    assert!(program.to_string().contains("q=?0"), "{program}");
}
