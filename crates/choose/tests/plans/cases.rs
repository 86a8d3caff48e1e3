//! Random masks and configurations that tests of the plan share.

use counterpoint_choose::{DispatchAlgorithm, PassStages, PlanConfig, QueryExchange, StageCount};
use counterpoint_cost::CostModel;
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Topology};
use proptest::prelude::*;

#[path = "../../../mask/tests/random/mod.rs"]
mod random;

pub(crate) use random::masks;

pub(crate) fn spec() -> AttentionSpec {
    AttentionSpec {
        heads_q: 8,
        heads_kv: 2,
        head_dim: 64,
        head_dim_v: 32,
        dtype: DType::Bf16,
        scale: 0.125,
        softcap: 0.0,
        seqlen_sink: 0,
        gradient_shares: GradientShares::Accumulators,
        max_logits: false,
        dlse: false,
    }
}

/// Ranks, nodes, chunk sizes, algorithms and stages of all sorts. The cost model has no latency, so that many stages pay
/// off even on the small masks of a test.
pub(crate) fn configs() -> impl Strategy<Value = PlanConfig> {
    let algorithm = prop_oneof![
        Just(DispatchAlgorithm::Affinity),
        Just(DispatchAlgorithm::MinHeap),
        Just(DispatchAlgorithm::Sequential),
        Just(DispatchAlgorithm::Zigzag),
    ];
    let stages = prop_oneof![Just(StageCount::Auto), (0..7_usize).prop_map(StageCount::Fixed)];
    let stages =
        prop::array::uniform2(stages).prop_map(|[forward, backward]| PassStages { forward, backward });
    let query_exchange =
        prop_oneof![Just(QueryExchange::Auto), Just(QueryExchange::FewestBytes), Just(QueryExchange::Never)];
    (proptest::option::of(1..60_usize), algorithm, stages, query_exchange, 1..10_usize, 1..10_usize, 0..2_u8)
        .prop_map(|(chunk_size, dispatch, stages, query_exchange, world_size, node, latency)| {
            let mut cost = CostModel::H200;
            if latency == 0 {
                cost.launch_seconds = 0.0;
                cost.link.alpha_seconds = 0.0;
                cost.network.alpha_seconds = 0.0;
            }
            let topology = Topology { world_size, ranks_per_node: node.min(world_size) };
            PlanConfig { chunk_size, dispatch, stages, query_exchange, topology, cost }
        })
}
