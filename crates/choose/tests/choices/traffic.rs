//! What travels of a mask whose last block sees everything, compared with ring attention and what no plan as level can go below.

use counterpoint_choose::{DISPATCHES, DeviceModel, PlanConfig, QueryExchange, plan_attention, plan_mask};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, Plan, Planning, RankPlan, TrafficBounds};

use crate::case::cost;

/// Key rows received, with the key rows that take as many bytes as the queries that travel.
fn received(plan: &Plan, spec: &AttentionSpec) -> f64 {
    let keys: u64 = plan.ranks.iter().map(RankPlan::recv_rows).sum();
    let queries: u64 = plan.ranks.iter().map(RankPlan::query_recv_rows).sum();
    keys as f64 + queries as f64 * spec.exchanged_query_bytes() as f64 / spec.exchanged_key_bytes() as f64
}

#[test]
fn a_last_global_block_moves_what_level_ranks_must() {
    let spec = AttentionSpec::new(64, 8, 128, DType::Bf16);
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    for (tokens, block) in [(64 << 10, 2048), (1 << 20, 2048)] {
        let mask = Mask::last_global(tokens - block, block, block).unwrap();
        for query_exchange in [QueryExchange::Never, QueryExchange::Auto, QueryExchange::FewestBytes] {
            let config = PlanConfig { cost: cost(), query_exchange, ..PlanConfig::new(8) };
            let (chosen, choice) =
                plan_attention(&mask, &spec, &config, model, u64::MAX, &Planning::ALONE).unwrap();
            let bounds = TrafficBounds::new(&chosen, &mask, &spec);
            // Nothing as level as this receives two thirds of a ring, whoever owns what.
            assert!(bounds.lower_bound_tokens as f64 > 0.74 * bounds.ring_tokens as f64, "{bounds:?}");
            assert!(received(&chosen, &spec) <= 1.15 * bounds.lower_bound_tokens as f64, "{bounds:?}");
            let plans = DISPATCHES.map(|dispatch| {
                let plan = plan_mask(&mask, &spec, &PlanConfig { dispatch, ..config }).unwrap();
                (format!("{dispatch:?}"), plan)
            });
            for (name, plan) in plans.into_iter().chain([(format!("chosen, {:?}", choice.chosen), chosen)]) {
                let bounds = TrafficBounds::new(&plan, &mask, &spec);
                let of_ring = |rows: f64| rows / bounds.ring_tokens as f64;
                println!(
                    "{tokens} rows, queries {query_exchange:?}, {name}: {:.3} of a ring, bound without queries {:.3}, balance {:.3}",
                    of_ring(received(&plan, &spec)),
                    of_ring(bounds.lower_bound_tokens as f64),
                    plan.balance(),
                );
            }
            println!("{:?}", choice.candidates);
        }
    }
}
