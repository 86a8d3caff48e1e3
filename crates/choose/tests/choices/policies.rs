//! The policy that is chosen for each pass, compared with all policies that transports of such nodes run.

use std::time::{Duration, Instant};

use counterpoint_choose::{AttentionPrediction, PassChoice, attention_policies, plan_mask};
use counterpoint_plan::Planning;
use counterpoint_schedule::{GradientReduction, OverlapPolicy, RankTransport, Workload};

use crate::case::{Case, SEED, Sizes};
use crate::ratios::Ratios;
use crate::record::record;

/// Policies that users can name, chosen from or not, and that neither a variable of the process nor what a driver can (a partition) must
/// be there for.
const NAMED: [&str; 19] = [
    "sequential",
    "concurrent",
    "kernel-barrier",
    "concurrent+priority",
    "kernel-barrier+sm-margin=32",
    "concurrent+copy-engine",
    "kernel-barrier+copy-engine",
    "concurrent+sm-margin=8",
    "concurrent+sm-margin=16",
    "kernel-barrier+sm-margin=16",
    "concurrent+sm-margin=24",
    "concurrent+sm-margin=32",
    "kernel-barrier+priority",
    "concurrent+sm-margin=4",
    "concurrent+sm-margin=48",
    "concurrent+sm-margin=64",
    "kernel-barrier+sm-margin=8",
    "kernel-barrier+sm-margin=24",
    "kernel-barrier+sm-margin=64",
];

#[test]
fn none_that_runs_is_predicted_faster() {
    check(30, Sizes { most_ranks: 16, most_tokens: 1 << 16 });
}

#[test]
#[ignore = "takes minutes"]
fn none_that_runs_is_predicted_faster_at_any_size() {
    check(500, Sizes { most_ranks: 64, most_tokens: 1 << 20 });
}

fn check(cases: u64, sizes: Sizes) {
    println!("seed {SEED}");
    let (mut best, mut sequential) = (Ratios::default(), Ratios::default());
    let mut concurrent = [Ratios::default(), Ratios::default()];
    let (mut planning, mut choosing) = (Duration::ZERO, Duration::ZERO);
    for index in 0..cases {
        let case = Case::random(SEED, index, sizes);
        let (topology, cost) = (case.config.topology, case.config.cost);
        let began = Instant::now();
        let plan = plan_mask(&case.mask, &case.spec, &case.config).unwrap().over_nodes(&topology);
        planning += began.elapsed();
        let backward = Some(GradientReduction::default());
        let transports = RankTransport::of_gpus(&topology);
        let began = Instant::now();
        let choice =
            attention_policies(&plan, &case.spec, backward, transports, &topology, &cost, &Planning::ALONE)
                .unwrap();
        choosing += began.elapsed();
        let passes: [&PassChoice; 2] = [&choice.forward, choice.backward.as_ref().unwrap()];
        for text in NAMED {
            let policy: OverlapPolicy = text.parse().unwrap();
            if RankTransport::any_of(transports, &policy, Workload::Attention).is_err() {
                continue;
            }
            let named =
                AttentionPrediction::of(&plan, &case.spec, policy, backward, &topology, &cost).unwrap();
            let seconds = [named.forward.makespan(), named.backward.unwrap().makespan()];
            for (at, (pass, seconds)) in passes.iter().zip(seconds).enumerate() {
                let ratio = pass.chosen().seconds / seconds;
                let name = || format!("{}, pass {at}, {} and not {text}", case.name, pass.chosen().policy);
                match text {
                    "sequential" => sequential.add(ratio, &name()),
                    "concurrent" => concurrent[at].add(1.0 / ratio, &name()),
                    _ => {}
                }
                best.add(ratio, &name());
            }
        }
    }
    println!("planning {planning:.2?}, choosing {choosing:.2?}");
    println!("chosen over sequential: {}", sequential.text());
    println!("chosen over each that runs: {}", best.text());
    for (pass, ratios) in ["forward", "backward"].iter().zip(&concurrent) {
        println!("{pass}, always concurrent over chosen: {}", ratios.text());
    }
    if sizes.most_ranks > 16 {
        let rows = [
            ("always concurrent over chosen, forward", &concurrent[0]),
            ("always concurrent over chosen, backward", &concurrent[1]),
            ("chosen over sequential", &sequential),
            ("chosen over each that runs", &best),
        ];
        record("policy", cases, &rows);
    }
    assert!(sequential.worst().0 <= 1.0, "{:?}", sequential.worst());
    assert!(best.worst().0 <= 1.01, "{:?}", best.worst());
}
