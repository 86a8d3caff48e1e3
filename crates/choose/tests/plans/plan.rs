//! What every plan must hold, on random masks: all pairs once, exactly the needed rows, matching splits.

use crate::cases::{configs, masks, spec};
use crate::checks::{check_dispatch, check_exchange, check_hosting, check_pairs};
use counterpoint_choose::{
    DispatchAlgorithm, PassStages, PlanConfig, StageCount, plan_cross_attention, plan_mask, plan_rank,
};
use counterpoint_cost::{CostModel, Link};
use counterpoint_mask::{Documents, Mask, Window};
use counterpoint_plan::{AttentionSpec, RankPlan};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_pair_is_computed_once(mask in masks(160), config in configs()) {
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        check_dispatch(&plan);
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        check_hosting(&mask, &plan);
    }

    #[test]
    fn cross_attention_of_equal_lengths(mask in masks(96), config in configs()) {
        let plan = plan_cross_attention(&mask, &spec(), &config).unwrap();
        check_dispatch(&plan);
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        check_hosting(&mask, &plan);
    }

    #[test]
    fn a_rank_alone_is_the_rank_of_the_whole(mask in masks(400), config in configs()) {
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        prop_assert_eq!(&plan, &plan_mask(&mask, &spec(), &config).unwrap());
        for rank in 0..plan.cp_size() {
            prop_assert_eq!(&plan_rank(&mask, &spec(), &config, rank).unwrap(), plan.rank(rank));
        }
    }
}

/// Masks that people use, on every dispatch.
#[test]
fn masks_of_the_builders() {
    let documents = || Documents::from_lengths([40, 1, 150, 0, 70]).unwrap();
    let window = Window { left: Some(30), right: Some(0), ..Window::default() };
    let masks = [
        Mask::causal(261).unwrap(),
        Mask::full(documents()).unwrap(),
        Mask::causal(documents()).unwrap(),
        Mask::sliding_window(documents(), window).unwrap(),
        Mask::block_causal(documents(), 16).unwrap(),
        Mask::prefix_lm(documents(), 12).unwrap(),
        Mask::shared_question(33, documents()).unwrap(),
        Mask::cross_causal(documents(), Documents::from_lengths([10, 5, 300, 7, 2]).unwrap()).unwrap(),
        Mask::cross_full(Documents::from(70), Documents::from(400)).unwrap(),
    ];
    for mask in &masks {
        for dispatch in [
            DispatchAlgorithm::Affinity,
            DispatchAlgorithm::MinHeap,
            DispatchAlgorithm::Sequential,
            DispatchAlgorithm::Zigzag,
        ] {
            for (ranks, chunk_size) in [(1, 64), (3, 13), (8, 32), (40, 16)] {
                let config = PlanConfig { chunk_size: Some(chunk_size), dispatch, ..PlanConfig::new(ranks) };
                let plan = plan_mask(mask, &spec(), &config).unwrap();
                assert_eq!(plan.q_dispatch.chunk_size(), chunk_size);
                check_dispatch(&plan);
                check_pairs(mask, &plan);
                check_exchange(mask, &plan);
            }
        }
    }
}

/// Long enough for owners' rows to be received in several layers.
#[test]
fn rows_received_in_layers() {
    let mask = Mask::causal(4000).unwrap();
    for dispatch in [DispatchAlgorithm::Affinity, DispatchAlgorithm::MinHeap] {
        for (ranks, chunk_size, stages) in [(2, 100, 3), (3, 64, 5)] {
            let stages = StageCount::Fixed(stages).into();
            let config =
                PlanConfig { chunk_size: Some(chunk_size), dispatch, stages, ..PlanConfig::new(ranks) };
            let plan = plan_mask(&mask, &spec(), &config).unwrap();
            check_pairs(&mask, &plan);
            check_exchange(&mask, &plan);
            check_hosting(&mask, &plan);
            let layered = |rank: &RankPlan| {
                let firsts: Vec<usize> = rank
                    .forward
                    .iter()
                    .flat_map(|stage| &stage.recv_ranges)
                    .map(|range| range.start)
                    .collect();
                firsts.windows(2).filter(|pair| pair[1] < pair[0]).count() > 1
            };
            let in_layers = plan.ranks.iter().any(layered);
            assert_eq!(
                in_layers,
                ranks > 2 || dispatch == DispatchAlgorithm::MinHeap,
                "{dispatch:?} on {ranks}"
            );
        }
    }
}

/// Cutting by chunks and stages must not leave crumbs: pieces that are one band again are one band.
#[test]
fn neighbours_are_fused() {
    let config = |dispatch| PlanConfig {
        chunk_size: Some(64),
        dispatch,
        stages: StageCount::Fixed(3).into(),
        ..PlanConfig::new(4)
    };
    let full = Mask::full(4096).unwrap();
    let plan = plan_mask(&full, &spec(), &config(DispatchAlgorithm::Zigzag)).unwrap();
    for stage in plan.ranks.iter().flat_map(|rank| rank.forward.iter().chain(&rank.backward)) {
        assert_eq!(stage.bands.len(), 1, "16 chunks of rows, 16 runs of columns, one rectangle");
    }
    let causal = Mask::causal(4096).unwrap();
    let plan = plan_mask(&causal, &spec(), &config(DispatchAlgorithm::Sequential)).unwrap();
    for rank in &plan.ranks {
        for stage in &rank.forward {
            assert_eq!(stage.bands.len(), usize::from(stage.key_rows > 0));
        }
    }
    // Zigzag of single causal chunks: a rank's rows are two blocks, each a rectangle and a triangle.
    let config = PlanConfig { chunk_size: Some(512), ..config(DispatchAlgorithm::Zigzag) };
    let plan = plan_mask(&causal, &spec(), &config).unwrap();
    for stage in plan.ranks.iter().flat_map(|rank| &rank.forward) {
        assert!(stage.bands.len() <= 3, "{:?}", stage.bands);
    }
}

/// What one pass is cut into says nothing about the other.
#[test]
fn each_pass_has_its_own_stages() {
    const COUNTS: [StageCount; 4] =
        [StageCount::Auto, StageCount::Fixed(0), StageCount::Fixed(1), StageCount::Fixed(3)];
    let plan = |stages| {
        let config = PlanConfig { chunk_size: Some(128), stages, ..PlanConfig::new(4) };
        plan_mask(&Mask::causal(4096).unwrap(), &spec(), &config).unwrap()
    };
    let same = COUNTS.map(|count| plan(PassStages::from(count)));
    assert_ne!(same[2].ranks[0].forward, same[3].ranks[0].forward);
    for (forward, of_forward) in COUNTS.into_iter().zip(&same) {
        for (backward, of_backward) in COUNTS.into_iter().zip(&same) {
            let both = plan(PassStages { forward, backward });
            for ((rank, of_forward), of_backward) in
                both.ranks.iter().zip(&of_forward.ranks).zip(&of_backward.ranks)
            {
                assert_eq!(rank.forward, of_forward.forward, "{forward} and {backward}");
                assert_eq!(rank.backward, of_backward.backward, "{forward} and {backward}");
            }
        }
    }
}

#[test]
fn all_work_at_once_where_ranks_own_whole_blocks() {
    let config = |chunk_size| PlanConfig {
        chunk_size: Some(chunk_size),
        stages: StageCount::Fixed(0).into(),
        ..PlanConfig::new(4)
    };
    for mask in [Mask::full(2048).unwrap(), Mask::causal(2048).unwrap()] {
        let plan = plan_mask(&mask, &spec(), &config(128)).unwrap();
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        for stages in plan.ranks.iter().flat_map(|rank| [&rank.forward, &rank.backward]) {
            assert_eq!(stages.len(), 2);
            assert_eq!((stages[0].area, stages[1].own_rows), (0, 512));
        }
        // 8 rows less, and ranks own blocks that are cut.
        let plan = plan_mask(&Mask::full(2040).unwrap(), &spec(), &config(128)).unwrap();
        assert!(plan.ranks.iter().all(|rank| rank.forward.len() == 2 && rank.forward[1].own_rows == 0));
    }
    // A GPU gives up overlap where it costs more than it hides, and only there.
    let rows = |cost| {
        let config = PlanConfig { chunk_size: Some(128), cost, ..PlanConfig::new(2) };
        let spec = AttentionSpec { heads_q: 64, heads_kv: 8, head_dim: 128, head_dim_v: 128, ..spec() };
        plan_mask(&Mask::causal(4096).unwrap(), &spec, &config).unwrap().ranks[0].forward[1].own_rows
    };
    assert_eq!(rows(CostModel::H200), 2048);
    assert_eq!(rows(CostModel { tiles: None, ..CostModel::H200 }), 0);
    let link = Link { alpha_seconds: 1e-5, bytes_per_second: 1e10 };
    assert_eq!(rows(CostModel { link, ..CostModel::H200 }), 0);
}

/// Longer sequences, so that lists of remote rows have many key blocks to cut between.
fn long_case() -> impl Strategy<Value = (Mask, PlanConfig)> {
    (masks(1500), configs())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn long_sequences(case in long_case()) {
        let (mask, config) = case;
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        check_hosting(&mask, &plan);
        if let StageCount::Fixed(stages) = config.stages.forward {
            let remote = plan.ranks.iter().any(|rank| rank.recv_rows() > 0);
            prop_assert_eq!(plan.rank(0).forward.len(), if remote { stages.max(1) + 1 } else { 1 });
        }
    }
}
