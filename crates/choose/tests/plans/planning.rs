//! Plans that are made by several threads, or not to the end.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_choose::{
    ChooseError, DispatchAlgorithm, PlanConfig, QueryExchange, StageCount, plan_mask, plan_mask_on,
    plan_mask_within, plan_stages_within,
};
use counterpoint_cost::CostModel;
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, CancellationToken, DType, Helpers, PlanError, Planning, Topology};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A thread for every task, the last first.
struct Threads;

impl Helpers for Threads {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        thread::scope(|scope| (0..tasks).rev().for_each(|at| drop(scope.spawn(move || task(at)))));
    }
}

fn packed(tokens: usize, random: &mut ChaCha8Rng) -> Documents {
    let (mut left, mut lengths) = (tokens, Vec::new());
    while left > 0 {
        let length = random.random_range(1..tokens.min(6000)).min(left);
        lengths.push(length);
        left -= length;
    }
    Documents::from_lengths(lengths).unwrap()
}

/// Every kind of plan is the same to the last bit, whoever helps.
#[test]
fn helpers_change_nothing() {
    const SEED: u64 = 20_261_127;
    for case in 0..60 {
        let mut random = ChaCha8Rng::seed_from_u64(SEED ^ case << 32);
        let ranks = [2, 3, 4, 8, 16, 24][random.random_range(0..6)];
        let tokens = 128 * random.random_range(8..200);
        let documents = packed(tokens, &mut random);
        let mask = match random.random_range(0..4) {
            0 => Mask::full(documents),
            1 => Mask::causal(tokens),
            2 => Mask::block_causal(documents, 512),
            _ => Mask::causal(documents),
        };
        let mask = mask.unwrap();
        let spec = AttentionSpec::new(8, 2, 128, DType::Bf16);
        let ranks_per_node = if ranks % 2 == 0 && random.random() { ranks / 2 } else { ranks };
        let config = PlanConfig {
            dispatch: match random.random_range(0..3) {
                0 => DispatchAlgorithm::Zigzag,
                _ => DispatchAlgorithm::Affinity,
            },
            stages: [StageCount::Auto, StageCount::Fixed(0), StageCount::Fixed(3)][random.random_range(0..3)]
                .into(),
            query_exchange: match random.random_range(0..6) {
                0 => QueryExchange::Auto,
                1 => QueryExchange::FewestBytes,
                _ => QueryExchange::Never,
            },
            topology: Topology { world_size: ranks, ranks_per_node },
            cost: if random.random_range(0..4) == 0 { CostModel::CPU } else { CostModel::H200 },
            ..PlanConfig::new(ranks)
        };
        let alone = plan_mask(&mask, &spec, &config).unwrap();
        let planning = Planning::ALONE.with_helpers(&Threads);
        let helped = plan_mask_within(&mask, &spec, &config, u64::MAX, &planning).unwrap();
        assert!(alone == helped, "seed {SEED}, case {case}: {ranks} ranks, {tokens} tokens, {config:?}");
        let again = plan_stages_within(&alone, &mask, &spec, &config, u64::MAX, &planning).unwrap();
        assert!(alone == again, "seed {SEED}, case {case}, staged again: {config:?}");
        let on = |planning: &Planning<'_>| plan_mask_on(&alone, &mask, &spec, &config, planning).unwrap();
        assert!(
            on(&Planning::ALONE) == on(&planning),
            "seed {SEED}, case {case}, on its dispatch: {config:?}"
        );
    }
}

/// Wherever a plan is when it is called off, it ends soon and says so.
#[test]
fn a_plan_that_is_cancelled_ends_soon() {
    const SEED: u64 = 5;
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let mask = Mask::causal(packed(1 << 20, &mut random)).unwrap();
    let spec = AttentionSpec::new(64, 8, 128, DType::Bf16);
    let token = CancellationToken::new();
    token.cancel();
    let mut late = Vec::new();
    for ranks in [8, 64] {
        let config = PlanConfig::new(ranks);
        let plan = |token: &CancellationToken, helped: bool| {
            let planning = if helped { Planning::ALONE.with_helpers(&Threads) } else { Planning::ALONE };
            plan_mask_within(&mask, &spec, &config, u64::MAX, &planning.until(token))
        };
        assert_eq!(plan(&token, false), Err(ChooseError::Plan(PlanError::Cancelled)));
        let began = Instant::now();
        let whole = plan(&CancellationToken::new(), false).unwrap();
        let takes = began.elapsed();
        let on = plan_mask_on(&whole, &mask, &spec, &config, &Planning::ALONE.until(&token));
        assert_eq!(on, Err(ChooseError::Plan(PlanError::Cancelled)));
        for twentieth in 0..20 {
            for helped in [false, true] {
                let token = CancellationToken::new();
                let after = takes * twentieth / 20;
                let (ended, cancelled) = thread::scope(|scope| {
                    let ending = scope.spawn(|| (plan(&token, helped), Instant::now()));
                    thread::sleep(after);
                    token.cancel();
                    let cancelled = Instant::now();
                    (ending.join().unwrap(), cancelled)
                });
                match ended.0 {
                    Err(error) => {
                        assert_eq!(error, ChooseError::Plan(PlanError::Cancelled));
                        late.push(ended.1.saturating_duration_since(cancelled));
                    }
                    // It came too late.
                    Ok(plan) => assert!(plan == whole),
                }
            }
        }
    }
    late.sort_unstable();
    let (median, most) = (late[late.len() / 2], late[late.len() - 1]);
    println!("{} were called off and ended {median:?} after in the median, {most:?} at most", late.len());
    // A busy machine lets threads wait.
    assert!(median < Duration::from_millis(50), "seed {SEED}: {median:?}");
}
