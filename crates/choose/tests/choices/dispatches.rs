//! The dispatch that is chosen, compared with every dispatch that is offered, each with the policies that it would be run by.

use std::time::{Duration, Instant};

use counterpoint_choose::{
    DISPATCHES, DeviceModel, DispatchAlgorithm, PlanConfig, attention_policies, plan_attention, plan_mask,
};
use counterpoint_plan::{Plan, Planning};
use counterpoint_schedule::{GradientReduction, RankTransport};

use crate::case::{Case, SEED, Sizes};
use crate::ratios::Ratios;
use crate::record::record;

#[test]
fn none_that_is_offered_is_predicted_faster() {
    check(40, Sizes { most_ranks: 16, most_tokens: 1 << 16 });
}

#[test]
#[ignore = "takes minutes"]
fn none_that_is_offered_is_predicted_faster_at_any_size() {
    check(500, Sizes { most_ranks: 64, most_tokens: 1 << 19 });
}

/// What the passes take by the policies that are chosen for them.
pub(crate) fn seconds(case: &Case, plan: &Plan) -> f64 {
    let (topology, cost) = (case.config.topology, case.config.cost);
    let (backward, transports) = (Some(GradientReduction::default()), RankTransport::of_gpus(&topology));
    let choice =
        attention_policies(plan, &case.spec, backward, transports, &topology, &cost, &Planning::ALONE)
            .unwrap();
    choice.forward.chosen().seconds + choice.backward.unwrap().chosen().seconds
}

fn check(cases: u64, sizes: Sizes) {
    println!("seed {SEED}");
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    let (mut best, mut old) = (Ratios::default(), Ratios::default());
    let mut chosen = DISPATCHES.map(|algorithm| (algorithm, 0));
    let (mut left_out, mut affinity, mut choosing) = (0, Duration::ZERO, Duration::ZERO);
    for index in 0..cases {
        let case = Case::random(SEED, index, sizes);
        let began = Instant::now();
        let (plan, choice) =
            plan_attention(&case.mask, &case.spec, &case.config, model, u64::MAX, &Planning::ALONE).unwrap();
        choosing += began.elapsed();
        left_out += choice.candidates.iter().filter(|one| one.seconds.is_none()).count();
        chosen.iter_mut().filter(|(one, _)| *one == choice.chosen).for_each(|(_, count)| *count += 1);
        let taken = seconds(&case, &plan);
        for dispatch in DISPATCHES {
            let began = Instant::now();
            let config = PlanConfig { dispatch, ..case.config };
            let other = plan_mask(&case.mask, &case.spec, &config).unwrap().over_nodes(&config.topology);
            let planned = began.elapsed();
            let ratio = taken / seconds(&case, &other);
            if ratio > 1.01 {
                println!(
                    "{}: {:?} and not {dispatch:?}, {ratio:.3}: {:?}",
                    case.name, choice.chosen, choice.candidates
                );
            }
            best.add(ratio, &format!("{}: {:?} and not {dispatch:?}", case.name, choice.chosen));
            if dispatch == DispatchAlgorithm::Affinity {
                affinity += planned;
                old.add(1.0 / ratio, &format!("{}: {:?}", case.name, choice.chosen));
            }
        }
    }
    println!(
        "planning with affinity {affinity:.2?}, choosing and planning {choosing:.2?}, {left_out} left out"
    );
    println!("chosen: {chosen:?}");
    println!("chosen over each that is offered: {}", best.text());
    println!("always affinity over chosen: {}", old.text());
    if sizes.most_ranks > 16 {
        let rows = [("always affinity over chosen", &old), ("chosen over each that is offered", &best)];
        record("dispatch", cases, &rows);
    }
    assert!(best.worst().0 <= 1.01, "{:?}", best.worst());
}
