//! Query/output exchange: where it pays, what it saves, and that it is never predicted to be worse.

use crate::cases::{configs, masks};
use counterpoint_choose::{
    DispatchAlgorithm, PlanConfig, Prediction, QueryExchange, StageCount, plan_mask, plan_mask_on,
    plan_stages_within,
};
use counterpoint_mask::{AttnSlice, Documents, Mask, MaskType, Range};
use counterpoint_plan::{
    AttentionSpec, DType, GradientShares, Plan, PlanSummary, Planning, RankPlan, Topology,
};
use proptest::prelude::*;

/// Heads as large models have them: a query row is 8 times as long as a key row.
const SPEC: AttentionSpec = AttentionSpec {
    heads_q: 64,
    heads_kv: 8,
    head_dim: 128,
    head_dim_v: 128,
    dtype: DType::Bf16,
    scale: 0.088,
    softcap: 0.0,
    seqlen_sink: 0,
    gradient_shares: GradientShares::Accumulators,
    max_logits: false,
    dlse: false,
};

const SEQLEN: usize = 1 << 16;

fn slice(q: (usize, usize), k: (usize, usize), mask_type: MaskType) -> AttnSlice {
    AttnSlice::new(Range::new(q.0, q.1), Range::new(k.0, k.1), mask_type)
}

/// Documents of 2048 rows that see themselves, and a block of `rows` at the end that sees everything.
fn last_global_block(rows: usize) -> Mask {
    let end = SEQLEN - rows;
    let documents = (0..end).step_by(2048).map(|start| (start, (start + 2048).min(end)));
    let mut slices: Vec<AttnSlice> =
        documents.map(|document| slice(document, document, MaskType::Causal)).collect();
    slices.push(slice((end, SEQLEN), (0, SEQLEN), MaskType::Full));
    Mask::new(SEQLEN, SEQLEN, slices).unwrap()
}

/// A causal window of 1024 keys, and `rows` tokens in front that see everything and are seen by all.
fn global_tokens(rows: usize) -> Mask {
    let (all, window) = ((0, SEQLEN), 1024);
    let slices = vec![
        slice((0, rows), all, MaskType::Full),
        slice((rows, SEQLEN), (0, rows), MaskType::Full),
        slice((rows, rows + window), (rows, rows + window), MaskType::Causal),
        slice((rows + window, SEQLEN), (rows + 1, SEQLEN), MaskType::BiCausal),
    ];
    Mask::new(SEQLEN, SEQLEN, slices).unwrap()
}

/// Few queries over many keys.
fn few_queries() -> Mask {
    Mask::cross_full(64, SEQLEN).unwrap()
}

fn config(ranks: usize, query_exchange: QueryExchange) -> PlanConfig {
    PlanConfig { query_exchange, ..PlanConfig::new(ranks) }
}

/// Bytes that travel in a forward and a backward.
fn bytes(plan: &Plan, spec: &AttentionSpec) -> u64 {
    let keys: u64 = plan.ranks.iter().map(RankPlan::recv_rows).sum();
    let queries: u64 = plan.ranks.iter().map(RankPlan::query_recv_rows).sum();
    let key_bytes = 2 * spec.kv_row_bytes() + spec.kv_gradient_row_bytes();
    let query_bytes = spec.hosted_forward_bytes().total() + spec.hosted_backward_bytes().total();
    keys * key_bytes as u64 + queries * query_bytes as u64
}

/// What the exchange of queries makes of a mask: key rows received without and with it, query rows that travel instead, and
/// how much sooner forward and backward are predicted to end.
struct Gain {
    without: Plan,
    with: Plan,
    key_rows: [u64; 2],
    query_rows: u64,
    forward: f64,
    backward: f64,
}

fn gain(mask: &Mask, spec: &AttentionSpec, ranks: usize) -> Gain {
    let [without, with] = [QueryExchange::Never, QueryExchange::Auto].map(|exchange| {
        let config = config(ranks, exchange);
        let plan = plan_mask(mask, spec, &config).unwrap();
        let prediction = Prediction::new(&plan, spec, &config);
        (plan, prediction)
    });
    let key_rows = |plan: &Plan| plan.ranks.iter().map(RankPlan::recv_rows).sum::<u64>();
    Gain {
        key_rows: [key_rows(&without.0), key_rows(&with.0)],
        query_rows: with.0.ranks.iter().map(RankPlan::query_recv_rows).sum(),
        forward: without.1.forward_seconds() / with.1.forward_seconds(),
        backward: without.1.backward_seconds() / with.1.backward_seconds(),
        without: without.0,
        with: with.0,
    }
}

/// The block's owner fetches no more than its documents need; its rows are computed by all.
#[test]
fn a_last_global_block_is_computed_where_the_keys_are() {
    let gain = gain(&last_global_block(128), &SPEC, 8);
    assert_eq!(gain.query_rows, 7 * 128);
    let saved = gain.key_rows[0] - gain.key_rows[1];
    assert!(saved > 7 * SEQLEN as u64 / 8 - 4096, "{saved} of {} rows saved", gain.key_rows[0]);
    assert!(bytes(&gain.with, &SPEC) < bytes(&gain.without, &SPEC) / 3);
    assert!(gain.forward > 1.4 && gain.backward > 1.2, "{} {}", gain.forward, gain.backward);
    assert!(gain.with.balance() < gain.without.balance(), "{}", gain.with.balance());
}

#[test]
fn global_tokens_are_computed_where_the_keys_are() {
    let gain = gain(&global_tokens(64), &SPEC, 8);
    assert_eq!(gain.query_rows, 7 * 64);
    let saved = gain.key_rows[0] - gain.key_rows[1];
    assert!(saved > 7 * SEQLEN as u64 / 8 - 4096, "{saved} of {} rows saved", gain.key_rows[0]);
    assert!(gain.forward > 1.2 && gain.backward > 1.2, "{} {}", gain.forward, gain.backward);
}

/// One rank owns all queries. No key row travels, and all ranks compute.
#[test]
fn few_queries_over_many_keys_travel_to_the_keys() {
    let gain = gain(&few_queries(), &SPEC, 8);
    assert_eq!(gain.key_rows, [7 * SEQLEN as u64 / 8, 0]);
    assert_eq!(gain.query_rows, 7 * 64);
    let saved = bytes(&gain.without, &SPEC) - bytes(&gain.with, &SPEC);
    // 57,344 rows of 16 KiB less 448 rows of 112.75 KiB.
    assert_eq!(saved, 57_344 * 16_384 - 448 * 115_456);
    assert!(gain.forward > 3.0 && gain.backward > 3.0, "{} {}", gain.forward, gain.backward);
    assert!((gain.with.balance() - 1.0).abs() < 1e-9 && gain.without.balance() == 8.0);
}

/// Rows that see everything among rows that see a few keys each, in cross-attention.
fn few_queries_among_others(wide: usize) -> Mask {
    let (queries, far) = (SEQLEN / 4, 512);
    let mut slices = vec![slice((0, wide), (0, SEQLEN), MaskType::Full)];
    slices.extend((wide..queries).step_by(far).map(|start| {
        let end = (start + far).min(queries);
        slice((start, end), (4 * start, 4 * end), MaskType::Full)
    }));
    Mask::new(queries, SEQLEN, slices).unwrap()
}

/// Who owns which rows of cross-attention is chosen for the work that is left: by so much sooner than on the owners that suit all of it.
#[test]
fn cross_attention_is_dispatched_for_the_rows_that_stay() {
    for (ranks, wide, of_time) in [(4, 64, 0.97), (8, 1024, 0.9)] {
        let mask = few_queries_among_others(wide);
        let gain = gain(&mask, &SPEC, ranks);
        assert_ne!(gain.with.q_dispatch, gain.without.q_dispatch);
        assert!(gain.forward > 1.2 && gain.backward > 1.2, "{} {}", gain.forward, gain.backward);
        let config = config(ranks, QueryExchange::Auto);
        let on_those = plan_mask_on(&gain.without, &mask, &SPEC, &config, &Planning::ALONE).unwrap();
        let [here, there] = [&gain.with, &on_those].map(|plan| {
            let prediction = Prediction::new(plan, &SPEC, &config);
            prediction.forward_seconds() + prediction.backward_seconds()
        });
        assert!(here < of_time * there, "{here} s and {there} s");
        assert!(gain.with.balance() <= on_those.balance(), "{} {}", gain.with.balance(), on_those.balance());
    }
}

/// Where rows of all ranks see the same keys, moving queries saves none.
#[test]
fn dense_masks_move_keys_only() {
    for mask in [Mask::full(SEQLEN).unwrap(), Mask::causal(SEQLEN).unwrap()] {
        for exchange in [QueryExchange::Auto, QueryExchange::FewestBytes] {
            let plan = plan_mask(&mask, &SPEC, &config(8, exchange)).unwrap();
            assert!(plan.ranks.iter().all(|rank| rank.hosted.is_none()));
        }
    }
}

/// Of documents in blocks of 2,048 whose last 2,048 rows see everything, on 8 ranks: bytes as parts of a ring's, without queries that travel and with
/// those that move the fewest. Where heads are as many as key heads, rows see the keys of owners of whom only some are worth hosting them.
#[test]
fn some_keys_of_a_row_are_hosted_and_others_fetched() {
    let (ranks, block) = (8, 2048);
    let mut in_part = 0;
    for (tokens, documents) in [(1 << 16, 2), (1 << 16, 8), (1 << 20, 2), (1 << 20, 8)] {
        let lengths = Documents::from_lengths(vec![tokens / documents; documents]).unwrap();
        let mask = Mask::last_global(lengths, block, block).unwrap();
        for heads_q in [64, 8] {
            let spec = AttentionSpec { heads_q, ..SPEC };
            let ring = (tokens * (ranks - 1)) as f64 * spec.exchanged_key_bytes() as f64;
            let of = |query_exchange| {
                let plan = plan_mask(&mask, &spec, &config(ranks, query_exchange)).unwrap();
                (
                    bytes(&plan, &spec) as f64 / ring,
                    plan.ranks.iter().any(RankPlan::is_hosted_in_part),
                    plan.balance(),
                )
            };
            let [never, fewest, auto] =
                [QueryExchange::Never, QueryExchange::FewestBytes, QueryExchange::Auto].map(of);
            println!("{tokens} of {documents}, {heads_q}:8: {never:.3?} {fewest:.3?} {auto:.3?}");
            assert!(fewest.0 <= never.0);
            in_part += usize::from(fewest.1);
        }
    }
    assert!(in_part >= 3, "{in_part} of 8");
}

#[test]
fn a_summary_has_both_exchanges() {
    let mask = few_queries();
    let plan = plan_mask(&mask, &SPEC, &config(8, QueryExchange::Auto)).unwrap();
    let summary = PlanSummary::new(&plan, &mask, &SPEC, 0.0);
    assert_eq!((summary.comm.recv_tokens, summary.comm.query_tokens), (0, 7 * 64));
    let sent: Vec<u64> = summary.ranks.iter().map(|rank| rank.query_send_tokens).collect();
    assert_eq!(sent.iter().sum::<u64>(), 7 * 64);
    assert!(summary.ranks.iter().all(|rank| rank.hosted_area == 64 * SEQLEN as u64 / 8));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Never predicted to be worse, in either direction; and fewest bytes are no more bytes.
    #[test]
    fn never_worse(mask in masks(900), config in configs(), wide in any::<bool>()) {
        let spec = if wide { SPEC } else { AttentionSpec { heads_q: 2, ..crate::cases::spec() } };
        let config = PlanConfig { stages: StageCount::Auto.into(), ..config };
        let [never, fewest, auto] =
            [QueryExchange::Never, QueryExchange::FewestBytes, QueryExchange::Auto].map(|query_exchange| {
                let config = PlanConfig { query_exchange, ..config };
                let plan = plan_mask(&mask, &spec, &config).unwrap();
                let prediction = Prediction::new(&plan, &spec, &config);
                (bytes(&plan, &spec), prediction.forward_seconds(), prediction.backward_seconds())
            });
        prop_assert!(fewest.0 <= never.0);
        prop_assert!(auto.1 <= never.1 && auto.2 <= never.2, "{:?} {:?}", auto, never);
    }

    /// Who computes what does not depend on the stages.
    #[test]
    fn stages_decide_nothing(mask in masks(600), config in configs()) {
        let hosted = |count: StageCount| {
            let config = PlanConfig { stages: count.into(), query_exchange: QueryExchange::Auto, ..config };
            let plan = plan_mask(&mask, &crate::cases::spec(), &config).unwrap();
            plan.ranks.into_iter().map(|rank| rank.hosted).collect::<Vec<_>>()
        };
        let auto = hosted(StageCount::Auto);
        prop_assert_eq!(&auto, &hosted(StageCount::Fixed(0)));
        prop_assert_eq!(&auto, &hosted(StageCount::Fixed(1)));
        prop_assert_eq!(&auto, &hosted(StageCount::Fixed(4)));
    }
}

/// Every dispatch, and ranks on several nodes: the rows that see everything are offloaded, and no others.
#[test]
fn whatever_the_dispatch() {
    for dispatch in [
        DispatchAlgorithm::Affinity,
        DispatchAlgorithm::MinHeap,
        DispatchAlgorithm::Sequential,
        DispatchAlgorithm::Zigzag,
    ] {
        for topology in [Topology::flat(4), Topology { world_size: 8, ranks_per_node: 4 }] {
            let config = PlanConfig { dispatch, topology, ..config(4, QueryExchange::FewestBytes) };
            for mask in [last_global_block(64), global_tokens(64), few_queries()] {
                let plan = plan_mask(&mask, &SPEC, &config).unwrap();
                let queries: u64 = plan.ranks.iter().map(RankPlan::query_recv_rows).sum();
                assert_eq!(queries, 64 * (topology.world_size as u64 - 1), "{dispatch:?} on {topology:?}");
            }
        }
    }
}

/// A plan that is cut into stages again has the same owners and hosts, and is the plan that would have been made so.
#[test]
fn other_stages_leave_owners_and_hosts() {
    for mask in [Mask::cross_full(64, 64 << 10).unwrap(), Mask::cross_full(32, 20_000).unwrap()] {
        let config = PlanConfig { query_exchange: QueryExchange::FewestBytes, ..PlanConfig::new(4) };
        let plan = plan_mask(&mask, &SPEC, &config).unwrap();
        assert!(plan.ranks.iter().any(|rank| rank.hosted.is_some()));
        for stages in [StageCount::Auto, StageCount::Fixed(1), StageCount::Fixed(3)] {
            let config = PlanConfig { stages: stages.into(), ..config };
            let again = plan_stages_within(&plan, &mask, &SPEC, &config, u64::MAX, &Planning::ALONE).unwrap();
            assert_eq!(again, plan_mask(&mask, &SPEC, &config).unwrap(), "{stages:?}");
        }
    }
}
