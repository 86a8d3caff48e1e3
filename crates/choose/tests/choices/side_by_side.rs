//! Choices that are made by several threads, or not to the end.

use std::thread;

use counterpoint_choose::{
    ChooseError, DeviceModel, PlanConfig, QueryExchange, attention_policies, plan_attention,
};
use counterpoint_plan::{CancellationToken, Helpers, PlanError, Planning};
use counterpoint_schedule::{GradientReduction, RankTransport};

use crate::case::{Case, SEED, Sizes};

/// A thread for every task, the last first.
struct Threads;

impl Helpers for Threads {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        thread::scope(|scope| (0..tasks).rev().for_each(|at| drop(scope.spawn(move || task(at)))));
    }
}

/// The plan, the dispatches that it was chosen from and the policies are the same to the last bit.
#[test]
fn helpers_change_no_choice() {
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    let helped = Planning::ALONE.with_helpers(&Threads);
    for index in 0..24 {
        let Case { name, mask, spec, config } =
            Case::random(SEED ^ 7, index, Sizes { most_ranks: 16, most_tokens: 1 << 16 });
        let query_exchange = if index % 6 == 0 { QueryExchange::Auto } else { QueryExchange::Never };
        let config = PlanConfig { query_exchange, ..config };
        let [alone, with_help] = [&Planning::ALONE, &helped]
            .map(|planning| plan_attention(&mask, &spec, &config, model, u64::MAX, planning).unwrap());
        assert!(alone == with_help, "seed {SEED}, {name}: {:?} and {:?}", alone.1, with_help.1);
        let (topology, backward) = (config.topology, Some(GradientReduction::default()));
        let transports = RankTransport::of_gpus(&topology);
        let [alone, with_help] = [&Planning::ALONE, &helped].map(|planning| {
            let plan = &alone.0;
            attention_policies(plan, &spec, backward, transports, &topology, &config.cost, planning).unwrap()
        });
        assert_eq!(alone, with_help, "seed {SEED}, {name}");
    }
}

/// A choice that is called off says so, with helpers and without.
#[test]
fn a_choice_that_is_cancelled_is_none() {
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    let token = CancellationToken::new();
    token.cancel();
    let Case { mask, spec, config, .. } =
        Case::random(SEED, 1, Sizes { most_ranks: 8, most_tokens: 1 << 14 });
    for planning in [Planning::ALONE, Planning::ALONE.with_helpers(&Threads)] {
        let chosen = plan_attention(&mask, &spec, &config, model, u64::MAX, &planning.until(&token));
        assert!(matches!(chosen, Err(ChooseError::Plan(PlanError::Cancelled))), "seed {SEED}: {chosen:?}");
    }
}
