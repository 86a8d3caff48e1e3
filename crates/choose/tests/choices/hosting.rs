//! Where rows are computed, keys or queries travelling: what `auto` keeps beside keys that travel alone.

use counterpoint_choose::{DeviceModel, plan_attention};
use counterpoint_plan::{CostModel, Plan, PlanConfig, Planning, QueryExchange, StageCount};

use crate::case::{Case, SEED, Sizes};
use crate::dispatches::seconds;
use crate::ratios::Ratios;

#[test]
fn queries_travel_only_where_that_is_predicted_faster() {
    check(25, Sizes { most_ranks: 16, most_tokens: 1 << 15 });
}

#[test]
#[ignore = "takes minutes"]
fn queries_travel_only_where_that_is_predicted_faster_at_any_size() {
    check(200, Sizes { most_ranks: 64, most_tokens: 1 << 18 });
}

fn planned(case: &Case, config: &PlanConfig) -> Plan {
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    plan_attention(&case.mask, &case.spec, config, model, u64::MAX, &Planning::ALONE).unwrap().0
}

fn hosts(plan: &Plan) -> bool {
    plan.ranks.iter().any(|rank| rank.hosted.is_some())
}

fn check(cases: u64, sizes: Sizes) {
    println!("seed {SEED}");
    let [mut auto, mut never] = [Ratios::default(), Ratios::default()];
    for index in 0..cases {
        let case = Case::random(SEED, index, sizes);
        let of = |query_exchange| planned(&case, &PlanConfig { query_exchange, ..case.config });
        let [with, without] = [QueryExchange::Auto, QueryExchange::Never].map(of);
        let ratio = seconds(&case, &with) / seconds(&case, &without);
        if hosts(&with) {
            println!("{}: queries travel, {ratio:.3} of the time", case.name);
        }
        auto.add(ratio, &case.name);
        never.add(1.0 / ratio, &case.name);
    }
    println!("auto over never: {}", auto.text());
    println!("never over auto: {}", never.text());
    assert!(auto.worst().0 <= 1.01, "{:?}", auto.worst());
    // What is missed where queries never travel, which is the default.
    assert!(never.share_above(1.01) <= 0.02, "{}", never.text());
}

/// Who computes what follows from the shipped figures: neither what was measured nor stages change it.
#[test]
fn measurements_and_stages_decide_nothing_about_hosts() {
    let mut found = 0;
    for tokens in [8 << 10, 32 << 10] {
        let mask = counterpoint_mask::Mask::cross_full(64, tokens).unwrap();
        let case = Case { mask, ..Case::random(SEED, 0, Sizes { most_ranks: 4, most_tokens: 1 << 12 }) };
        let config = PlanConfig { query_exchange: QueryExchange::Auto, ..PlanConfig::new(8) };
        let usual = planned(&case, &PlanConfig { cost: crate::case::cost(), ..config });
        let slow = CostModel { backward_flops_per_second: 1e12, ..crate::case::cost() };
        let hosted = |plan: &Plan| plan.ranks.iter().map(|rank| rank.hosted.clone()).collect::<Vec<_>>();
        for other in [
            planned(&case, &PlanConfig { cost: slow, ..config }),
            planned(&case, &PlanConfig { cost: CostModel::CPU, ..config }),
            planned(&case, &PlanConfig { cost: slow, stages: StageCount::Fixed(3).into(), ..config }),
        ] {
            assert_eq!(hosted(&other), hosted(&usual));
            assert_eq!((&other.q_dispatch, &other.k_dispatch), (&usual.q_dispatch, &usual.k_dispatch));
        }
        found += usize::from(hosts(&usual));
    }
    assert!(found > 0, "nobody hosts");
}
