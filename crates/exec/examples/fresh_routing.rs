//! What a fresh routing costs the host: every stage of making the passes of a layer of experts ready for it, of one rank.
//!
//! `cargo run --release -p counterpoint-exec --example fresh_routing [repetitions [ranks]]`

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use counterpoint_exec::{
    ExpertLayer, ExpertOptions, ExpertOverlap, ExpertPass, ExpertPasses, Group, LayerCall, WorldConfig,
};
use counterpoint_plan::{DType, ExpertCapacity, ExpertGroups, ExpertKind, ExpertPlan, ExpertSpec, Routing};
use counterpoint_schedule::{
    GroupedLaunch, Op, OverlapPolicy, WeightGradient, lower_expert_backward, lower_expert_forward,
};

/// Ranks, each with so many tokens, of which each goes to so many of all experts.
const CASES: [(usize, usize, usize, usize); 3] = [(1, 4096, 8, 64), (2, 4096, 8, 64), (8, 4096, 8, 64)];

/// A routing of as many tokens, each with `choices` experts that differ: where the first lies and how far apart they are is drawn.
fn drawn(
    experts: usize,
    choices: usize,
    [ranks, tokens]: [usize; 2],
    seed: u64,
) -> Result<Arc<Routing>, Box<dyn Error>> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let mut one_rank = || -> Vec<u32> {
        let mut all: Vec<u32> = (0..experts as u32).collect();
        let mut ids = Vec::with_capacity(tokens * choices);
        for _ in 0..tokens {
            // The begin of a shuffle, which goes on from the last one's.
            for place in 0..choices {
                all.swap(place, place + draw() % (experts - place));
            }
            ids.extend(&all[..choices]);
        }
        ids
    };
    let ids: Vec<Vec<u32>> = (0..ranks).map(|_| one_rank()).collect();
    Ok(Arc::new(Routing::top_k(experts, choices, &ids)?))
}

/// The least milliseconds of some repetitions of `work` on fresh routings.
fn least<T>(all: &[Arc<Routing>], mut work: impl FnMut(&Arc<Routing>) -> T) -> f64 {
    let time = |routing: &Arc<Routing>| {
        let begin = Instant::now();
        black_box(work(routing));
        begin.elapsed().as_secs_f64() * 1e3
    };
    all.iter().map(time).fold(f64::INFINITY, f64::min)
}

// Long: one column of the table after the other.
fn main() -> Result<(), Box<dyn Error>> {
    let repetitions: u64 = std::env::args().nth(1).map_or(Ok(8), |text| text.parse())?;
    println!(
        "| ranks | policy | pass | top_k, ms | fingerprint | rows | lower | validate | launches | ready, first | ready, later |\n|---|---|---|---|---|---|---|---|---|---|---|"
    );
    let only: Option<usize> = std::env::args().nth(2).map(|text| text.parse()).transpose()?;
    for (ranks, tokens, choices, experts) in CASES {
        if only.is_some_and(|only| only != ranks) {
            continue;
        }
        let group = Group::local(ranks, WorldConfig::default())?;
        let drawn = |seed| drawn(experts, choices, [ranks, tokens], seed);
        let routings: Vec<Arc<Routing>> = (0..repetitions).map(drawn).collect::<Result<_, _>>()?;
        let ids = |routing: &Routing| -> Vec<Vec<u32>> {
            let of_rank =
                |rank| (0..tokens).flat_map(|token| routing.experts_of_token(rank, token).to_vec()).collect();
            (0..ranks).map(of_rank).collect()
        };
        let given: Vec<Vec<Vec<u32>>> = routings.iter().map(|routing| ids(routing)).collect();
        let mut next = given.iter();
        let top_k =
            least(&routings, |_| next.next().map(|ids| Routing::top_k(experts, choices, ids).is_ok()));
        let fingerprint = least(&routings, |routing| routing.fingerprint());
        let ways =
            [(OverlapPolicy::SEQUENTIAL, 1), (OverlapPolicy::CONCURRENT, 1), (OverlapPolicy::CONCURRENT, 4)];
        for (policy, count) in ways {
            let groups = ExpertGroups::even(count);
            let gradient = WeightGradient::Written;
            for kind in [ExpertKind::Dispatch, ExpertKind::Combine] {
                let spec = ExpertSpec { kind, in_features: 64, out_features: 64, dtype: DType::F32 };
                for call in [LayerCall::Forward, LayerCall::Backward] {
                    let plan = |routing: &Arc<Routing>| ExpertPlan::new(spec, routing.clone(), groups);
                    let lower = |plan: &ExpertPlan| match call {
                        LayerCall::Forward => lower_expert_forward(plan, 0, policy),
                        _ => lower_expert_backward(plan, 0, gradient, policy),
                    };
                    let find = |routing: &Arc<Routing>| {
                        let plan = plan(&Arc::new(Routing::clone(routing)));
                        let rows = plan.rows_of(0);
                        let gives = (kind == ExpertKind::Combine) == (call == LayerCall::Forward);
                        let arriving = (!gives || kind == ExpertKind::Dispatch)
                            .then(|| plan.arriving(&rows).tokens.len());
                        (arriving, gives.then(|| plan.leaving(&rows).to.len()))
                    };
                    let rows = least(&routings, find);
                    let lowering = least(&routings, |routing| lower(&plan(routing)));
                    let programs: Vec<_> = routings.iter().map(|routing| lower(&plan(routing))).collect();
                    let mut all = programs.iter();
                    let validate = least(&routings, |_| all.next().map(|program| program.validate()));
                    let mut all = programs.iter();
                    let launches = least(&routings, |_| {
                        let waves = all.next().into_iter().flat_map(|program| &program.ops);
                        let waves = waves.filter_map(|op| match &op.op {
                            Op::WaveGemm(waves) => Some(GroupedLaunch::of(&waves.groups)),
                            _ => None,
                        });
                        waves.count()
                    });
                    let pass = ExpertPass { policy, groups };
                    let overlap = ExpertOverlap::Passes(ExpertPasses { forward: pass, backward: pass });
                    let capacity = ExpertCapacity::default();
                    let options = ExpertOptions { spec, experts, gradient, capacity, overlap };
                    let mut layers = [ExpertLayer::new(&group, options)?, ExpertLayer::new(&group, options)?];
                    let fresh: Vec<Arc<Routing>> =
                        (repetitions..2 * repetitions).map(drawn).collect::<Result<_, _>>()?;
                    // All ranks here, one after the other; the second layer finds what the first has found of the routing.
                    let mut ready = [f64::INFINITY; 2];
                    for routing in &fresh {
                        for (layer, ready) in layers.iter_mut().zip(&mut ready) {
                            let begin = Instant::now();
                            layer.route_for(routing.clone(), call, None)?;
                            *ready = ready.min(begin.elapsed().as_secs_f64() * 1e3 / ranks as f64);
                        }
                    }
                    let [first, later] = ready;
                    println!(
                        "| {ranks} | {policy}, {count} | {kind} {call:?} | {top_k:.2} | {fingerprint:.2} | {rows:.2} | {lowering:.2} | \
                         {validate:.2} | {launches:.2} | {first:.2} | {later:.2} |"
                    );
                }
            }
        }
    }
    Ok(())
}
