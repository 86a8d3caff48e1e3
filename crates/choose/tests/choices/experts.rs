//! How well the ways hide that are chosen for layers of experts, on modelled machines.

use std::sync::Arc;

use counterpoint_choose::{ExpertDirection, expert_pass, expert_programs};
use counterpoint_cost::{CostModel, WorkerSharing};
use counterpoint_plan::{
    DType, ExpertGroups, ExpertKind, ExpertPlan, ExpertSpec, RandomRouting, Routing, Topology,
};
use counterpoint_schedule::{OverlapPolicy, RankTransport, StartOrder, WeightGradient, simulate};

/// Passes of layers with 64 experts of which each token has 4.
fn passes() -> Vec<(ExpertSpec, ExpertDirection)> {
    let backward = ExpertDirection::Backward(WeightGradient::Accumulated(DType::F32));
    let mut all = Vec::new();
    for kind in [ExpertKind::Dispatch, ExpertKind::Combine] {
        for direction in [ExpertDirection::Forward, backward] {
            for inner in [2048, 8192] {
                let (in_features, out_features) = match kind {
                    ExpertKind::Dispatch => (4096, inner),
                    ExpertKind::Combine => (inner, 4096),
                };
                all.push((ExpertSpec { kind, in_features, out_features, dtype: DType::Bf16 }, direction));
            }
        }
    }
    all
}

/// Seconds of what is chosen and with nothing side by side, and of the longer of computation and communication alone.
fn over_the_longer(
    (spec, direction): (ExpertSpec, ExpertDirection),
    routing: &Arc<Routing>,
    (transports, topology): (&[RankTransport], Topology),
    cost: &CostModel,
) -> [f64; 3] {
    let ranks: Vec<usize> = (0..routing.ranks()).collect();
    let timeline = |policy: OverlapPolicy, groups: ExpertGroups| {
        let plan = ExpertPlan::new(spec, routing.clone(), groups);
        simulate(&expert_programs(&plan, &ranks, direction, policy), &topology, cost).unwrap()
    };
    let sequential = timeline(OverlapPolicy::new(StartOrder::Sequential), ExpertGroups::default());
    let of_rank = |rank: usize| {
        let spans = sequential.spans.iter().filter(|span| span.rank == rank);
        let sum = |label: fn(&str) -> bool| -> f64 {
            spans.clone().filter(|span| label(&span.label)).map(|span| span.end - span.start).sum()
        };
        let communicates = |label: &str| label == "dispatch" || label == "combine";
        (sum(|label| !(label == "dispatch" || label == "combine")), sum(communicates))
    };
    // What is waited for in a collective is none of its time: the rank that is last in it waits least.
    let computation = ranks.iter().map(|rank| of_rank(*rank).0).fold(0.0, f64::max);
    let communication = ranks.iter().map(|rank| of_rank(*rank).1).fold(f64::INFINITY, f64::min);
    let longer = f64::max(computation, communication);
    let choice = expert_pass(spec, routing, direction, transports, &topology, cost).unwrap();
    let chosen = choice.chosen();
    let seconds = timeline(chosen.policy, chosen.groups).makespan();
    println!(
        "{} {direction:?} {}x{}: {} in {} groups: {:.3} of the longer ({:.0} us computed, {:.0} us sent), sequential {:.3}",
        spec.kind,
        spec.in_features,
        spec.out_features,
        chosen.policy,
        chosen.groups,
        seconds / longer,
        1e6 * computation,
        1e6 * communication,
        sequential.makespan() / longer,
    );
    [seconds, sequential.makespan(), longer]
}

/// `most` of the longer of both, in passes that take long enough for the starts of kernels to be small compared with them; `most_of_short` in
/// others, where each group has a copy of rows and a product for each expert.
fn check(
    transports: &[RankTransport],
    topology: Topology,
    cost: &CostModel,
    [most, most_of_short]: [f64; 2],
) {
    let ranks = topology.world_size;
    let drawn = RandomRouting { experts: 64, choices: 4, ranks, tokens: 4096, skew: 0.0, seed: 1 };
    let routing = Arc::new(Routing::random(drawn).unwrap());
    for pass in passes() {
        let [chosen, sequential, longer] = over_the_longer(pass, &routing, (transports, topology), cost);
        let most = if longer < 1e-3 { most_of_short } else { most };
        assert!(chosen <= most * longer, "{pass:?}: {}", chosen / longer);
        assert!(chosen <= sequential * 1.001, "{pass:?}: {chosen} against {sequential}");
    }
}

#[test]
fn streams_that_do_not_slow_each_other_take_the_longer_of_both() {
    check(&[RankTransport::Cpu], Topology::flat(8), &CostModel::H200, [1.03, 1.12]);
}

/// Bounded by what products were measured to take under collectives, up to 1.53 of what they take alone: of eight passes six run one after
/// the other (`docs/experiments/033-scattered-rows.md`). Without that it would be 1.15 and 1.35.
#[test]
fn on_gpus_of_one_node() {
    let cost = CostModel { sharing: Some(WorkerSharing::H200), ..CostModel::H200 };
    check(RankTransport::of_gpus(&Topology::flat(8)), Topology::flat(8), &cost, [1.55, 1.7]);
}
