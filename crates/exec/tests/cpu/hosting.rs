//! Attention whose queries travel to the keys, tensors to tensors, against the dense f64 reference.

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, QueryExchange, StageCount, plan_mask};
use counterpoint_cost::{CostModel, Link};
use counterpoint_exec::{AttentionInputs, Pass, RunConfig, SlowLink, random_inputs, run_attention};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, Plan, RankPlan, Topology};
use counterpoint_reference::check_attention;
use counterpoint_schedule::{OverlapPolicy, SpanKind, StartOrder};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::spec;

const DISPATCHES: [DispatchAlgorithm; 4] = [
    DispatchAlgorithm::Affinity,
    DispatchAlgorithm::MinHeap,
    DispatchAlgorithm::Sequential,
    DispatchAlgorithm::Zigzag,
];

/// Some rows see much of everything, in slices of any type, the others little: a window of the keys that lie next to them.
fn mask_with_wide_rows(seqlen_q: usize, seqlen_k: usize, rng: &mut ChaCha8Rng) -> Mask {
    let mut slices = Vec::new();
    let mut row = 0;
    while row < seqlen_q {
        let wide = rng.random_bool(0.3);
        let rows = if wide { rng.random_range(1..6) } else { rng.random_range(10..80) };
        let q = Range::new(row, (row + rows).min(seqlen_q));
        row = q.end;
        let mut col = if wide { 0 } else { q.start * seqlen_k / seqlen_q };
        let end = if wide { seqlen_k } else { (q.end * seqlen_k / seqlen_q).max(col) };
        while col < end {
            let length = if wide { rng.random_range(20..200) } else { rng.random_range(5..60) };
            let k = Range::new(col, (col + length).min(end));
            col = k.end + rng.random_range(0..3) * usize::from(rng.random_bool(0.2));
            let mask_type = match rng.random_range(0..6) {
                0 => MaskType::Causal,
                1 => MaskType::InvCausal,
                2 => MaskType::BiCausal,
                _ => MaskType::Full,
            };
            slices.push(AttnSlice::new(q, k, mask_type));
        }
    }
    Mask::new(seqlen_q, seqlen_k, slices).unwrap()
}

fn config(cp_size: usize, chunk_size: usize, stages: StageCount) -> PlanConfig {
    let query_exchange = QueryExchange::FewestBytes;
    PlanConfig {
        chunk_size: Some(chunk_size),
        stages: stages.into(),
        query_exchange,
        ..PlanConfig::new(cp_size)
    }
}

fn is_hosted(plan: &Plan) -> bool {
    plan.ranks.iter().all(|rank| rank.hosted.is_some())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Self- and cross-attention, every dispatch, any number of ranks, stages and nodes, every policy and dtype, GQA, sink,
    /// softcap.
    #[test]
    fn forward_and_backward_are_right(
        seed: u64,
        seqlens in (150usize..400, 150usize..600, any::<bool>()),
        cp_size in 2usize..7,
        chunk_size in 8usize..90,
        stages in prop_oneof![Just(StageCount::Auto), (0usize..6).prop_map(StageCount::Fixed)],
        algorithm in 0usize..4,
        order in 0usize..4,
        dtype in 0usize..4,
        heads in prop_oneof![Just((1, 1)), Just((4, 2)), Just((2, 2))],
        dims in prop_oneof![Just((16, 16)), Just((5, 7))],
        sink in 0usize..3,
        softcap in prop_oneof![Just(0.0), Just(3.0)],
        deterministic: bool,
        nodes in 1usize..4,
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (seqlen_q, other, self_attention) = seqlens;
        let seqlen_k = if self_attention { seqlen_q } else { other };
        let mask = mask_with_wide_rows(seqlen_q, seqlen_k, &mut rng);
        let dtype = [DType::F64, DType::F32, DType::Bf16, DType::F16][dtype];
        let spec = AttentionSpec {
            softcap, seqlen_sink: sink, max_logits: seed % 2 == 0, dlse: seed % 3 == 0,
            ..spec(heads.0, heads.1, dims.0, dims.1, dtype)
        };
        let topology = Topology { world_size: cp_size, ranks_per_node: cp_size.div_ceil(nodes) };
        let dispatch = DISPATCHES[algorithm];
        let config = PlanConfig { topology, dispatch, ..config(cp_size, chunk_size, stages) };
        let plan = plan_mask(&mask, &spec, &config).unwrap().over_nodes(&topology);
        let inputs = random_inputs(&mask, &spec, seed, Pass::ForwardBackward);
        let policy = OverlapPolicy::new(StartOrder::ALL[order]);
        let run_config = RunConfig { policy: policy.into(), deterministic, ..RunConfig::default() };
        let run = run_attention(&plan, &spec, &inputs, &run_config).unwrap_or_else(|error| panic!("{error}"));
        let report = check_attention(&mask, &spec, &inputs, &run.outputs);
        prop_assert!(report.passed, "hosted {}: {:#?}", is_hosted(&plan), report);
    }
}

/// Of random masks with wide rows most are computed with hosts, and many by hosts and owners together, or the properties prove little.
#[test]
fn most_masks_with_wide_rows_have_hosts() {
    let planned = |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mask = mask_with_wide_rows(300, 300, &mut rng);
        let spec = spec(4, 2, 16, 16, DType::Bf16);
        plan_mask(&mask, &spec, &config(4, 32, StageCount::Auto)).unwrap()
    };
    let hosted: Vec<Plan> = (0..50).map(planned).filter(is_hosted).collect();
    let in_part = hosted.iter().filter(|plan| plan.ranks.iter().any(RankPlan::is_hosted_in_part)).count();
    assert!(hosted.len() > 30, "{} of 50", hosted.len());
    assert!(in_part > 10, "{in_part} of {}", hosted.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Any policy, number of stages and repetition: the same bits, on nodes too.
    #[test]
    fn deterministic_runs_are_bit_equal(
        seed: u64, cp_size in 2usize..7, nodes in 1usize..4, bf16 in any::<bool>()
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let seqlen = rng.random_range(400..900);
        let mask = mask_with_wide_rows(seqlen, seqlen, &mut rng);
        let dtype = if bf16 { DType::Bf16 } else { DType::F32 };
        let spec = AttentionSpec { seqlen_sink: 1, max_logits: true, dlse: true, ..spec(2, 2, 16, 16, dtype) };
        let topology = Topology { world_size: cp_size, ranks_per_node: cp_size.div_ceil(nodes) };
        let inputs = random_inputs(&mask, &spec, seed, Pass::ForwardBackward);
        let mut first = None;
        for (order, stages) in [(0, 1), (1, 2), (2, 3), (1, 0), (2, 0), (1, 5), (1, 2)] {
            let stages = StageCount::Fixed(stages);
            let config = PlanConfig { topology, ..config(cp_size, 32, stages) };
            let plan = plan_mask(&mask, &spec, &config).unwrap().over_nodes(&topology);
            let policy = OverlapPolicy::new(StartOrder::ALL[order]);
            let run_config = RunConfig { policy: policy.into(), deterministic: true, ..RunConfig::default() };
            let outputs = run_attention(&plan, &spec, &inputs, &run_config).unwrap().outputs;
            let first = first.get_or_insert_with(|| outputs.clone());
            prop_assert!(*first == outputs, "{:?} {:?}", policy, stages);
        }
    }
}

/// 64 queries over 4,096 keys on a slow link: queries travel, and the run ends sooner than where keys do.
#[test]
fn few_queries_end_sooner_where_they_travel() {
    let mask = Mask::cross_full(64, 4096).unwrap();
    let spec = spec(4, 4, 64, 64, DType::F32);
    let link = Link { alpha_seconds: 1e-3, bytes_per_second: 3e7 };
    let cost = CostModel {
        forward_flops_per_second: 2e10,
        backward_flops_per_second: 2e10,
        memory_bytes_per_second: 5e9,
        launch_seconds: 1e-5,
        link,
        ..CostModel::H200
    };
    let inputs = AttentionInputs { dout: None, ..random_inputs(&mask, &spec, 1, Pass::ForwardBackward) };
    let slow_link = SlowLink {
        alpha: std::time::Duration::from_millis(1),
        bytes_per_second: link.bytes_per_second,
        network: None,
    };
    let run_config = RunConfig { slow_link: Some(slow_link), ..RunConfig::default() };
    let run = |query_exchange| {
        let config = PlanConfig { query_exchange, cost, ..PlanConfig::new(4) };
        let plan = plan_mask(&mask, &spec, &config).unwrap();
        let run = run_attention(&plan, &spec, &inputs, &run_config).unwrap();
        assert!(check_attention(&mask, &spec, &inputs, &run.outputs).passed);
        (plan, run)
    };
    let (without, slow) = run(QueryExchange::Never);
    let (with, quick) = run(QueryExchange::Auto);
    assert_eq!((without.rank(0).forward.len() > 1, with.rank(0).forward.len()), (true, 1));
    assert!(with.ranks.iter().all(|rank| rank.recv_rows() == 0));
    let (slow, quick_seconds) = (slow.forward.duration(), quick.forward.duration());
    assert!(quick_seconds < 0.7 * slow, "{quick_seconds} s against {slow} s");
    let named = |label: &str, kind| {
        (0..4).all(|rank| {
            let mut spans = quick.forward.spans.iter();
            spans.any(|span| span.rank == rank && span.label == label && span.kind == kind)
        })
    };
    assert!(named("cast q", SpanKind::Communication) && named("reduce out lse", SpanKind::Communication));
    assert!(named("hosted attention forward", SpanKind::Compute));
}
