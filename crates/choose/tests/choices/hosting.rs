//! Where rows are computed, keys or queries travelling: what `auto` keeps, compared with keys that travel alone.

use counterpoint_choose::{
    DeviceModel, PlanConfig, QueryExchange, StageCount, attention_policies, modelled_transports,
    plan_attention,
};
use counterpoint_cost::CostModel;
use counterpoint_plan::{AttentionSpec, DType, Plan, Planning};
use counterpoint_schedule::GradientReduction;

use crate::case::{Case, SEED, Sizes};
use crate::ratios::Ratios;

/// Seconds of a forward and a backward by the policies that are chosen for them.
fn passes(case: &Case, plan: &Plan) -> [f64; 2] {
    let Case { spec, config: PlanConfig { topology, cost, .. }, .. } = case;
    let (backward, transports) = (Some(GradientReduction::default()), modelled_transports(topology, cost));
    let choice =
        attention_policies(plan, spec, backward, transports, topology, cost, &Planning::ALONE).unwrap();
    [choice.forward.chosen().seconds, choice.backward.unwrap().chosen().seconds]
}

#[test]
fn queries_travel_only_where_that_is_predicted_faster() {
    let sizes = Sizes { most_ranks: 16, most_tokens: 1 << 15 };
    check((0..25).map(|index| Case::random(SEED, index, sizes)), 0);
}

/// Of masks some of whose rows see everything, on GPUs and on CPUs.
#[test]
fn rows_that_see_everything_travel_only_where_that_is_predicted_faster() {
    let sizes = Sizes { most_ranks: 16, most_tokens: 1 << 15 };
    check((0..40).map(|index| of_either_device(index, sizes)), 4);
}

#[test]
#[ignore = "takes minutes"]
fn queries_travel_only_where_that_is_predicted_faster_at_any_size() {
    let sizes = Sizes { most_ranks: 64, most_tokens: 1 << 18 };
    check((0..200).map(|index| Case::random(SEED, index, sizes)), 0);
    check((0..200).map(|index| of_either_device(index, sizes)), 20);
}

fn of_either_device(index: u64, sizes: Sizes) -> Case {
    let case = Case::with_wide_rows(SEED, index, sizes);
    match index % 2 {
        0 => case,
        _ => {
            let config = PlanConfig { cost: CostModel::CPU, ..case.config };
            let spec = AttentionSpec { dtype: DType::F32, ..case.spec };
            Case { name: format!("{} on CPUs", case.name), config, spec, ..case }
        }
    }
}

fn planned(case: &Case, config: &PlanConfig) -> Plan {
    let model = match case.config.cost.tiles {
        Some(_) => DeviceModel::of_machine("NVIDIA H200").unwrap(),
        None => DeviceModel::for_choices("CPU", &CostModel::CPU),
    };
    plan_attention(&case.mask, &case.spec, config, model, u64::MAX, &Planning::ALONE).unwrap().0
}

fn hosts(plan: &Plan) -> bool {
    plan.ranks.iter().any(|rank| rank.hosted.is_some())
}

/// `auto`, the default, is no slower than `never`, `fewest_bytes` or the other way for queries to cross between nodes; a pass may lose a part of
/// what the other one gains. Queries travel in so many cases at least.
fn check(cases: impl Iterator<Item = Case>, hosted_at_least: usize) {
    println!("seed {SEED}");
    let [mut auto, mut of_passes, mut never, mut fewest] = std::array::from_fn(|_| Ratios::default());
    let (mut hosted, mut of_ways) = (0, Ratios::default());
    for case in cases {
        let of = |query_exchange| planned(&case, &PlanConfig { query_exchange, ..case.config });
        let with = of(QueryExchange::Auto);
        let [taken, without, by_bytes] = [&with, &of(QueryExchange::Never), &of(QueryExchange::FewestBytes)]
            .map(|plan| passes(&case, plan));
        let ratio = taken.iter().sum::<f64>() / without.iter().sum::<f64>();
        if hosts(&with) {
            hosted += 1;
            println!("{}: queries travel, {ratio:.3} of the time", case.name);
            if case.config.topology.nodes() > 1 {
                let other =
                    Plan { queries_go_straight: !with.queries_go_straight, two_level: None, ..with.clone() };
                let other = passes(&case, &other.over_nodes(&case.config.topology)).iter().sum::<f64>();
                let way = if with.queries_go_straight { "straight" } else { "in two steps" };
                of_ways.add(taken.iter().sum::<f64>() / other, &format!("{}, {way}", case.name));
            }
        }
        auto.add(ratio, &case.name);
        (0..2).for_each(|pass| of_passes.add(taken[pass] / without[pass], &case.name));
        never.add(1.0 / ratio, &case.name);
        fewest.add(taken.iter().sum::<f64>() / by_bytes.iter().sum::<f64>(), &case.name);
    }
    println!("queries travel in {hosted}");
    println!("auto over never: {}", auto.text());
    println!("each pass of auto over never's: {}", of_passes.text());
    println!("auto over fewest bytes: {}", fewest.text());
    println!("never over auto: {}", never.text());
    println!("queries on their way over the other way: {}", of_ways.text());
    assert!(auto.worst().0 <= 1.01, "{:?}", auto.worst());
    assert!(fewest.worst().0 <= 1.01, "{:?}", fewest.worst());
    assert!(of_ways.worst().0 <= 1.01, "{:?}", of_ways.worst());
    assert!(of_passes.worst().0 <= 1.16, "{:?}", of_passes.worst());
    assert!(hosted >= hosted_at_least, "{hosted}");
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
