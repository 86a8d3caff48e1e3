//! What is built around a plan: figures, predictions, the cache, bad configurations, other masks on one dispatch.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::cases::{configs, masks, spec};
use counterpoint_choose::{
    ChooseError, ConfigError, DispatchAlgorithm, MAX_CP_SIZE, MAX_STAGES, PlanConfig, Prediction, StageCount,
    plan_cross_attention, plan_mask, plan_mask_on, plan_rank,
};
use counterpoint_cost::Link;
use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{
    Fingerprint, Plan, PlanCache, PlanError, PlanSummary, Planning, RankSummary, Topology,
};
use proptest::prelude::*;

fn causal(length: usize) -> Mask {
    Mask::causal(length).expect("a length above 0")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn serde_round_trip(mask in masks(300), config in configs()) {
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        let text = serde_json::to_string(&plan).unwrap();
        prop_assert_eq!(&plan, &serde_json::from_str::<Plan>(&text).unwrap());
        let config_text = serde_json::to_string(&config).unwrap();
        prop_assert_eq!(config, serde_json::from_str::<PlanConfig>(&config_text).unwrap());
    }

    #[test]
    fn the_summary_adds_up(mask in masks(300), config in configs()) {
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        let summary = PlanSummary::new(&plan, &mask, &spec(), 0.25);
        let matrix = plan.communication_matrix();
        let ranks = plan.cp_size();
        prop_assert_eq!(summary.area, mask.area());
        prop_assert_eq!(summary.solve_seconds, 0.25);
        if let Some(chunk_size) = config.chunk_size {
            prop_assert_eq!(summary.chunk_size, chunk_size);
        }
        let most = summary.ranks.iter().map(|rank| rank.area).max().unwrap();
        prop_assert!((summary.balance * mask.area() as f64 - (most * ranks as u64) as f64).abs() <= 1e-6 * most as f64);
        prop_assert_eq!(summary.ranks.iter().map(|rank| rank.chunks.len()).sum::<usize>(), summary.num_chunks);
        for rank in &summary.ranks {
            let (me, n) = (rank.rank, ranks);
            prop_assert_eq!(rank.recv_tokens, (0..n).map(|owner| matrix[owner * n + me]).sum::<u64>());
            prop_assert_eq!(rank.send_tokens, matrix[me * n..(me + 1) * n].iter().sum::<u64>());
            prop_assert_eq!(rank.recv_tokens, rank.recv_ranges.iter().map(|[start, end]| (end - start) as u64).sum::<u64>());
            prop_assert!(rank.recv_ranges.windows(2).all(|pair| pair[0][1] < pair[1][0]));
            let stages = rank.stages.iter().map(|stage| stage.area).sum::<u64>();
            prop_assert_eq!(rank.area, stages + rank.hosted_area);
            prop_assert_eq!(rank.recv_tokens, rank.stages.iter().map(|stage| stage.recv_tokens).sum::<u64>());
        }
        prop_assert_eq!(summary.comm.recv_tokens, matrix.iter().sum::<u64>());
        let queries = |of: fn(&RankSummary) -> u64| summary.ranks.iter().map(of).sum::<u64>();
        prop_assert_eq!(summary.comm.query_tokens, queries(|rank| rank.query_recv_tokens));
        prop_assert_eq!(summary.comm.query_tokens, queries(|rank| rank.query_send_tokens));
        // Where queries travel there may be fewer keys to send than any dispatch needs without.
        let hosted = plan.ranks.iter().any(|rank| rank.hosted.is_some());
        prop_assert!(hosted || summary.comm.lower_bound_tokens <= summary.comm.recv_tokens);
        prop_assert!(summary.comm.recv_tokens <= summary.comm.all_gather_tokens);
    }

    #[test]
    fn another_mask_on_the_same_dispatch(first in masks(200), seed in masks(200), config in configs()) {
        // The second mask is cut to the first one's lengths.
        let (q, k) = (Range::new(0, first.seqlen_q()), Range::new(0, first.seqlen_k()));
        let slices = seed.slices().iter().filter(|slice| slice.q_range.end <= q.end && slice.k_range.end <= k.end);
        let other = Mask::new(q.end, k.end, slices.copied().collect()).unwrap();
        let plan = plan_mask(&first, &spec(), &config).unwrap();
        let moved = plan_mask_on(&plan, &other, &spec(), &config, &Planning::ALONE).unwrap();
        prop_assert_eq!(&moved.q_dispatch, &plan.q_dispatch);
        prop_assert_eq!(&moved.k_dispatch, &plan.k_dispatch);
        prop_assert_eq!(moved.area(), other.area());
        // A dispatch that was made for offloaded rows may be one on which it is better to offload others.
        if plan.ranks.iter().all(|rank| rank.hosted.is_none()) {
            prop_assert_eq!(&plan_mask_on(&plan, &first, &spec(), &config, &Planning::ALONE).unwrap(), &plan);
        }
    }

    #[test]
    fn predictions_are_made_of_stages(mask in masks(600), config in configs()) {
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        let prediction = Prediction::new(&plan, &spec(), &config);
        for (direction, ranks) in [&prediction.forward, &prediction.backward].into_iter().enumerate() {
            for (rank, predicted) in plan.ranks.iter().zip(ranks) {
                let stages = [&rank.forward, &rank.backward][direction];
                prop_assert_eq!(stages.len(), predicted.stages.len());
                let sum = |of: fn(&counterpoint_choose::StagePrediction) -> f64| -> f64 {
                    predicted.stages.iter().chain(&predicted.hosted).map(of).sum()
                };
                prop_assert_eq!(rank.hosted.is_some(), predicted.hosted.is_some());
                let compute = sum(|stage| stage.compute_seconds);
                let cast = sum(|stage| stage.cast_seconds);
                let reduce = sum(|stage| stage.reduce_seconds);
                let rounding = 1e-12 * (compute + cast + reduce);
                prop_assert!(predicted.seconds + rounding >= compute.max(reduce));
                prop_assert!(predicted.seconds <= compute + cast + reduce + rounding);
                prop_assert!(direction == 1 || rank.hosted.is_some() || reduce == 0.0);
                prop_assert_eq!(predicted.stages[0].cast_seconds, 0.0);
            }
        }
    }

    /// Whatever the machine, a number of stages that is chosen is no worse than a single stage, by what is reported: where kernels' tiles
    /// are not known. Where they are, they decide, and what is reported by pairs may be more.
    #[test]
    fn chosen_stages_are_never_worse_than_one(
        mask in masks(3000),
        config in configs(),
        launch in 0.0..1e-5_f64,
        latency in prop_oneof![Just(0.0), 0.0..1e-5_f64],
        link in 6.0..11.0_f64,
        network in 6.0..11.0_f64,
        flops in 10.0..13.0_f64,
    ) {
        let mut config = PlanConfig { stages: StageCount::Fixed(1).into(), ..config };
        config.cost.tiles = None;
        config.cost.launch_seconds = launch;
        config.cost.link = Link { alpha_seconds: latency, bytes_per_second: 10_f64.powf(link) };
        config.cost.network = Link { alpha_seconds: 2.0 * latency, bytes_per_second: 10_f64.powf(network) };
        config.cost.forward_flops_per_second = 10_f64.powf(flops);
        config.cost.backward_flops_per_second = 10_f64.powf(flops);
        let predict = |config: &PlanConfig| {
            Prediction::new(&plan_mask(&mask, &spec(), config).unwrap(), &spec(), config)
        };
        let one = predict(&config);
        let auto = predict(&PlanConfig { stages: StageCount::Auto.into(), ..config });
        for (auto, one) in [
            (auto.forward_seconds(), one.forward_seconds()),
            (auto.backward_seconds(), one.backward_seconds()),
        ] {
            prop_assert!(auto <= one * (1.0 + 1e-9), "{auto} with chosen stages, {one} with one");
        }
    }
}

#[test]
fn the_summary_is_the_documented_json() {
    let mask = causal(512);
    let config = PlanConfig { chunk_size: Some(64), ..PlanConfig::new(2) };
    let plan = plan_mask(&mask, &spec(), &config).unwrap();
    let json = serde_json::to_value(PlanSummary::new(&plan, &mask, &spec(), 0.5)).unwrap();
    let keys =
        |value: &serde_json::Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    let sorted = |names: &[&str]| -> Vec<String> {
        let mut names: Vec<String> = names.iter().map(ToString::to_string).collect();
        names.sort();
        names
    };
    let same = |value: &serde_json::Value, names: &[&str]| {
        let mut found = keys(value);
        found.sort();
        assert_eq!(found, sorted(names));
    };
    same(
        &json,
        &["area", "cp_size", "chunk_size", "num_chunks", "solve_seconds", "balance", "ranks", "comm"],
    );
    same(
        &json["ranks"][0],
        &[
            "rank",
            "chunks",
            "tokens",
            "area",
            "recv_tokens",
            "send_tokens",
            "query_recv_tokens",
            "query_send_tokens",
            "hosted_area",
            "recv_ranges",
            "stages",
        ],
    );
    same(&json["ranks"][0]["stages"][0], &["area", "recv_tokens"]);
    same(
        &json["comm"],
        &["recv_tokens", "query_tokens", "lower_bound_tokens", "ring_tokens", "all_gather_tokens"],
    );
    assert_eq!(json["area"], 512 * 513 / 2);
    assert!(json["ranks"][1]["recv_ranges"][0][0].is_u64());
}

#[test]
fn more_stages_hide_a_slow_link() {
    // Communication takes about as long as computation: in one stage nothing hides it, in several most of it hides.
    let mask = causal(1 << 16);
    let mut config =
        PlanConfig { chunk_size: Some(512), stages: StageCount::Fixed(1).into(), ..PlanConfig::new(8) };
    config.cost.forward_flops_per_second = 2e12;
    config.cost.link = Link { alpha_seconds: 1e-6, bytes_per_second: 1e8 };
    let seconds = |config: &PlanConfig| {
        let plan = plan_mask(&mask, &spec(), config).unwrap();
        let prediction = Prediction::new(&plan, &spec(), config);
        (plan.rank(0).forward.len(), prediction.forward_seconds(), prediction.backward_seconds())
    };
    let (_, one, one_backward) = seconds(&config);
    config.stages = StageCount::Auto.into();
    let (stages, many, many_backward) = seconds(&config);
    assert!(stages > 2, "{stages}");
    assert!(many < 0.9 * one, "{many} {one}");
    // Affinity gives neighbouring chunks to one rank, so a stage of the backward may wait for a single busy owner.
    assert!(many_backward <= one_backward, "{many_backward} {one_backward}");
    // With a launch that costs more than all the work, one stage is best.
    config.cost.launch_seconds = 1.0;
    assert_eq!(seconds(&config).0, 2);
}

#[test]
fn a_chunk_size_is_chosen_where_none_is_asked_for() {
    for (length, ranks, wanted) in
        [(1 << 20, 8, 2048), (1 << 20, 64, 1024), (10_000, 8, 64), (20_000, 8, 128), (50, 4, 64)]
    {
        let plan = plan_mask(&causal(length), &spec(), &PlanConfig::new(ranks)).unwrap();
        assert_eq!(plan.q_dispatch.chunk_size(), wanted, "{length} rows on {ranks} ranks");
    }
}

/// The plan of a mask, made where the cache does not hold it.
fn cached(cache: &mut PlanCache, mask: &Mask, config: &PlanConfig) -> Result<Arc<Plan>, ChooseError> {
    let fingerprint = Fingerprint::of(mask, &spec(), config);
    match cache.find(&fingerprint) {
        Some(plan) => Ok(plan),
        None => Ok(cache.keep(fingerprint, Arc::new(plan_mask(mask, &spec(), config)?))),
    }
}

#[test]
fn the_cache_is_bounded_and_goes_by_content() {
    let mut cache = PlanCache::new(NonZeroUsize::new(2).unwrap());
    let config = PlanConfig::new(2);
    let mut plan = |length| cached(&mut cache, &causal(length), &config).unwrap();
    let first = plan(300);
    assert!(Arc::ptr_eq(&first, &plan(300)));
    assert_eq!(*first, plan_mask(&causal(300), &spec(), &config).unwrap());
    let second = plan(301);
    plan(300);
    plan(302);
    assert!(Arc::ptr_eq(&first, &plan(300)), "300 was used after 301");
    assert!(!Arc::ptr_eq(&second, &plan(301)), "301 had to go");
    assert_eq!((cache.len(), cache.capacity().get()), (2, 2));
    assert_eq!((cache.hits(), cache.misses()), (3, 4));
    assert!(cached(&mut cache, &causal(9), &PlanConfig::new(0)).is_err());
    assert_eq!((cache.len(), cache.misses()), (2, 5));
}

#[test]
fn fingerprints_distinguish_the_three_plans_of_a_mask() {
    let mask = causal(300);
    let config = PlanConfig { chunk_size: Some(16), ..PlanConfig::new(4) };
    let on = |config: &PlanConfig, by: &PlanConfig| {
        let base = plan_mask(&mask, &spec(), config).unwrap();
        Fingerprint::of_mask_on(&base, &mask, &spec(), &by.on_a_dispatch())
    };
    let zigzag = PlanConfig { dispatch: DispatchAlgorithm::Zigzag, ..config };
    let mut all = vec![
        Fingerprint::of(&mask, &spec(), &config),
        Fingerprint::of_cross_attention(&mask, &spec(), &config),
        on(&config, &config),
        on(&zigzag, &config),
        on(&PlanConfig { chunk_size: Some(17), ..config }, &config),
        on(&config, &PlanConfig { stages: StageCount::Fixed(2).into(), ..config }),
        plan_mask(&mask, &spec(), &config).unwrap().fingerprint(),
        Fingerprint::of(&mask, &spec(), &config).and(&"predicted"),
        Fingerprint::of(&mask, &spec(), &config).and(&"auto"),
    ];
    // What a second mask does not look at does not count.
    assert_eq!(on(&config, &PlanConfig { chunk_size: None, ..zigzag }), on(&config, &config));
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
    // Unequal lengths are cross-attention by whatever name.
    let uneven = Mask::new(100, 50, Vec::new()).unwrap();
    assert_eq!(
        Fingerprint::of(&uneven, &spec(), &config),
        Fingerprint::of_cross_attention(&uneven, &spec(), &config)
    );
}

#[test]
fn the_cache_holds_every_kind_of_plan() {
    let mut cache = PlanCache::new(NonZeroUsize::new(8).unwrap());
    let config = PlanConfig { chunk_size: Some(16), ..PlanConfig::new(4) };
    let zigzag = PlanConfig { dispatch: DispatchAlgorithm::Zigzag, ..config };
    let (mask, other) = (causal(300), Mask::new(300, 300, Vec::new()).unwrap());
    let bases = [config, zigzag].map(|config| plan_mask(&mask, &spec(), &config).unwrap());
    let on = |base: &Plan| plan_mask_on(base, &other, &spec(), &config, &Planning::ALONE).unwrap();
    let plans = [
        (Fingerprint::of(&mask, &spec(), &config), bases[0].clone()),
        (
            Fingerprint::of_cross_attention(&mask, &spec(), &config),
            plan_cross_attention(&mask, &spec(), &config).unwrap(),
        ),
        (Fingerprint::of_mask_on(&bases[0], &other, &spec(), &config.on_a_dispatch()), on(&bases[0])),
        (Fingerprint::of_mask_on(&bases[1], &other, &spec(), &config.on_a_dispatch()), on(&bases[1])),
    ];
    for (fingerprint, plan) in &plans {
        assert!(cache.find(fingerprint).is_none());
        cache.keep(*fingerprint, Arc::new(plan.clone()));
    }
    assert_eq!(cache.len(), 4);
    for (fingerprint, plan) in &plans {
        assert_eq!(cache.find(fingerprint).as_deref(), Some(plan));
    }
    for (base, (_, plan)) in bases.iter().zip(&plans[2..]) {
        assert_eq!(plan.q_dispatch, base.q_dispatch);
    }
}

/// Changes one number of a plan as it is written in JSON: the `nth` of all.
fn with_one_number_changed(plan: &Plan, nth: usize) -> Plan {
    fn change(value: &mut serde_json::Value, left: &mut usize) -> bool {
        match value {
            serde_json::Value::Number(number) => {
                let found = *left == 0;
                if found {
                    // Other than any value that stands there, and above 0: it also fits a chunk size or an end.
                    let changed = number.as_i64().map_or(1, |number| number.wrapping_add(1).max(1));
                    *value = changed.into();
                } else {
                    *left -= 1;
                }
                found
            }
            serde_json::Value::Array(values) => values.iter_mut().any(|value| change(value, left)),
            serde_json::Value::Object(fields) => fields.values_mut().any(|value| change(value, left)),
            _ => false,
        }
    }
    fn count(value: &serde_json::Value) -> usize {
        match value {
            serde_json::Value::Number(_) => 1,
            serde_json::Value::Array(values) => values.iter().map(count).sum(),
            serde_json::Value::Object(fields) => fields.values().map(count).sum(),
            _ => 0,
        }
    }
    let mut json = serde_json::to_value(plan).expect("a plan is plain data");
    let mut left = nth % count(&json);
    assert!(change(&mut json, &mut left));
    serde_json::from_value(json).expect("numbers stay numbers")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Two ranks compare fingerprints to find out whether they planned the same.
    #[test]
    fn a_plans_fingerprint_is_its_content(mask in masks(300), config in configs(), nth: usize) {
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        let again = plan_mask(&mask, &spec(), &config).unwrap();
        prop_assert_eq!(plan.fingerprint(), again.fingerprint());
        let changed = with_one_number_changed(&plan, nth);
        prop_assert_ne!(&changed, &plan);
        prop_assert_ne!(changed.fingerprint(), plan.fingerprint());
    }
}

#[test]
fn bad_configurations_are_refused() {
    let plan = |change: fn(&mut PlanConfig)| {
        let mut config = PlanConfig::new(4);
        change(&mut config);
        match plan_mask(&causal(100), &spec(), &config) {
            Err(ChooseError::Config(refused)) => refused,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(plan(|config| config.chunk_size = Some(0)), ConfigError::ZeroChunkSize);
    assert_eq!(
        plan(|config| config.topology = Topology::flat(0)),
        ConfigError::CpSize { cp_size: 0, max: MAX_CP_SIZE }
    );
    assert_eq!(
        plan(|config| config.topology = Topology::flat(MAX_CP_SIZE + 1)),
        ConfigError::CpSize { cp_size: MAX_CP_SIZE + 1, max: MAX_CP_SIZE }
    );
    for ranks_per_node in [0, 5] {
        let mut config = PlanConfig::new(4);
        config.topology.ranks_per_node = ranks_per_node;
        assert_eq!(config.validate(), Err(ConfigError::RanksPerNode { ranks_per_node, world_size: 4 }));
    }
    for stages in [MAX_STAGES + 1, usize::MAX] {
        let config = PlanConfig { stages: StageCount::Fixed(stages).into(), ..PlanConfig::new(4) };
        assert_eq!(config.validate(), Err(ConfigError::Stages { stages, max: MAX_STAGES }));
    }
    let message = plan(|config| config.cost.link.bytes_per_second = 0.0).to_string();
    assert_eq!(message, "the cost model's link.bytes_per_second is 0; it must be from 1e-6 to 1e30");
    assert!(matches!(plan(|config| config.cost.launch_seconds = f64::NAN), ConfigError::Cost(_)));
    let config = PlanConfig::new(4);
    assert_eq!(
        plan_rank(&causal(100), &spec(), &config, 4),
        Err(PlanError::Rank { rank: 4, cp_size: 4 }.into())
    );
    let whole = plan_mask(&causal(100), &spec(), &config).unwrap();
    assert_eq!(
        plan_mask_on(&whole, &causal(99), &spec(), &config, &Planning::ALONE),
        Err(PlanError::OtherLength { axis: "q".into(), mask: 99, plan: 100 }.into())
    );
    assert_eq!(
        plan_mask_on(&whole, &causal(100), &spec(), &PlanConfig::new(3), &Planning::ALONE),
        Err(PlanError::OtherWorldSize { config: 3, plan: 4 }.into())
    );
}
