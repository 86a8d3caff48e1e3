//! Layers of a mixture of experts: the definition for random routings, the same bits whatever overlaps, and what is refused.

use std::sync::Arc;

use counterpoint_choose::{
    GroupSearch, TunedExpertShape, TunedExperts, TunedHere, TunedPass, TunedPlace, TunedPlans,
};
use counterpoint_exec::{
    CpuMachine, ExecError, ExpertInputs, ExpertLayer, ExpertOptions, ExpertOutputs, ExpertOverlap,
    ExpertPass, ExpertPasses, Group, HostTensor, LayerCall, WorldConfig, random_tensor,
};
use counterpoint_plan::{
    DType, ExpertCapacity, ExpertGroups, ExpertKind, ExpertSpec, RandomRouting, Routing, Topology,
};
use counterpoint_reference::{LinearSample, check_experts};
use counterpoint_schedule::{OverlapPolicy, WeightGradient};

const NONE: u32 = Routing::NO_EXPERT;

fn random(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize
}

/// Experts of each token of each rank: a third of the tokens knows only the first experts, so that some are overfull and some empty, and
/// a rank may have no token.
fn random_routing(seed: &mut u64, ranks: usize, experts: usize, choices: usize) -> Routing {
    let mut ids = Vec::new();
    for _ in 0..ranks {
        let mut of_rank = Vec::new();
        for _ in 0..random(seed) % 40 {
            let few = random(seed).is_multiple_of(3);
            let mut all: Vec<u32> = (0..if few { choices } else { experts - experts / 4 } as u32).collect();
            for _ in 0..choices {
                let is_none = all.is_empty() || random(seed).is_multiple_of(6);
                of_rank.push(if is_none { NONE } else { all.swap_remove(random(seed) % all.len()) });
            }
        }
        ids.push(of_rank);
    }
    Routing::top_k(experts, choices, &ids).unwrap()
}

fn rows_of(routing: &Routing, rank: usize) -> usize {
    let experts = routing.experts_of(rank);
    routing.rows()[experts.start..experts.end].iter().sum()
}

struct Case {
    spec: ExpertSpec,
    routing: Arc<Routing>,
    gradient: WeightGradient,
    inputs: ExpertInputs,
}

impl Case {
    fn random(seed: u64, kind: ExpertKind, dtype: DType) -> Self {
        let mut draw = seed;
        let ranks = 1 + random(&mut draw) % 4;
        let experts = ranks * (1 + random(&mut draw) % 3);
        let choices = 1 + random(&mut draw) % experts.min(3);
        let routing = Arc::new(random_routing(&mut draw, ranks, experts, choices));
        let spec = ExpertSpec {
            kind,
            in_features: 1 + random(&mut draw) % 20,
            out_features: 1 + random(&mut draw) % 20,
            dtype,
        };
        let gradient = [
            WeightGradient::Frozen,
            WeightGradient::Written,
            WeightGradient::Accumulated(dtype.accumulator()),
        ][random(&mut draw) % 3];
        let tensors = |columns: usize, are_rows: bool, stream: u64| -> Vec<HostTensor> {
            let tensor = |rank: usize| {
                let rows = if are_rows { rows_of(&routing, rank) } else { routing.tokens(rank) };
                random_tensor(vec![rows, columns], dtype, seed * 100 + stream * 10 + rank as u64)
            };
            (0..ranks).map(tensor).collect()
        };
        let weights = |dtype, stream| {
            random_tensor(vec![experts * spec.out_features, spec.in_features], dtype, seed * 100 + stream)
        };
        let inputs = ExpertInputs {
            x: tensors(spec.in_features, kind == ExpertKind::Combine, 1),
            weight: weights(dtype, 20),
            dy: Some(tensors(spec.out_features, kind == ExpertKind::Dispatch, 3)),
            main_grad: match gradient {
                WeightGradient::Accumulated(dtype) => Some(weights(dtype, 40)),
                _ => None,
            },
        };
        Self { spec, routing, gradient, inputs }
    }

    fn layer(&self, group: &Group<CpuMachine>, pass: ExpertPass) -> ExpertLayer<CpuMachine> {
        let options = ExpertOptions {
            spec: self.spec,
            experts: self.routing.experts(),
            gradient: self.gradient,
            capacity: ExpertCapacity::default(),
            overlap: ExpertOverlap::Passes(ExpertPasses { forward: pass, backward: pass }),
        };
        ExpertLayer::new(group, options).unwrap()
    }

    /// All results, of outputs that were NaN before.
    fn run(&self, pass: ExpertPass) -> ExpertOutputs {
        let config = WorldConfig { poison: true, ..WorldConfig::default() };
        let group = Group::local(self.routing.ranks(), config).unwrap();
        let mut layer = self.layer(&group, pass);
        let weight = layer.scatter_weight(&self.inputs.weight).unwrap();
        layer.bind_weight(&weight).unwrap();
        layer.route(self.routing.clone()).unwrap();
        let x = layer.upload("x", self.inputs.x.clone()).unwrap();
        let y = layer.forward(&x).unwrap().result;
        let y = layer.download(&y).unwrap();
        let main_grad =
            self.inputs.main_grad.as_ref().map(|main_grad| layer.scatter_weight(main_grad).unwrap());
        if let Some(main_grad) = &main_grad {
            layer.bind_main_grad(main_grad).unwrap();
        }
        let dy = layer.upload("dy", self.inputs.dy.clone().unwrap()).unwrap();
        let dx = layer.backward(&x, &dy).unwrap().result;
        let dx = layer.download(&dx).unwrap();
        let dweight = main_grad.or_else(|| layer.weight_gradient());
        let dweight = dweight.map(|parts| layer.gather_weight(&parts).unwrap());
        ExpertOutputs { y, dx: Some(dx), dweight }
    }
}

fn pass(policy: &str, count: usize) -> ExpertPass {
    let growth = [100, 50, 200][(policy.len() + count) % 3];
    ExpertPass { policy: policy.parse().unwrap(), groups: ExpertGroups { count, growth } }
}

/// Token by token, the definition in f64; the same bits for every policy and any number of groups.
#[test]
fn random_routings_give_what_is_defined() {
    for seed in 0..24u64 {
        for kind in [ExpertKind::Dispatch, ExpertKind::Combine] {
            let dtype = [DType::F64, DType::F32, DType::Bf16][seed as usize % 3];
            let case = Case::random(seed, kind, dtype);
            let first = case.run(pass("sequential", 1));
            check_experts(&case.spec, &case.routing, &case.inputs, &first, LinearSample::Whole)
                .unwrap_or_else(|error| panic!("seed {seed}, {kind}, {dtype}: {error}"));
            for policy in ["concurrent", "kernel-barrier", "signals", "concurrent+sm-margin=1"] {
                let groups = 1 + (seed as usize + policy.len()) % 5;
                assert_eq!(
                    case.run(pass(policy, groups)),
                    first,
                    "seed {seed}, {kind}, {dtype}, {policy}, {groups}"
                );
            }
        }
    }
}

/// Wrong results are found: one of another expert, and one that lacks a token's second expert.
#[test]
fn what_is_wrong_is_named() {
    let case = Case::random(7, ExpertKind::Combine, DType::F32);
    let right = case.run(pass("concurrent", 2));
    // A sample has the first row and column, and the last.
    let check = |outputs: &ExpertOutputs| {
        let [whole, sampled] = [LinearSample::Whole, LinearSample::Spread(2)]
            .map(|sample| check_experts(&case.spec, &case.routing, &case.inputs, outputs, sample));
        assert_eq!(whole.is_ok(), sampled.is_ok());
        whole
    };
    check(&right).unwrap();
    let rank = (0..case.routing.ranks()).find(|&rank| right.y[rank].rows() > 1).unwrap();
    let mut wrong = right.clone();
    wrong.y[rank].as_mut_slice::<f32>().unwrap()[0] += 0.01;
    let refused = check(&wrong).unwrap_err().to_string();
    assert!(
        refused.contains(&format!("y of rank {rank}")) && refused.contains("row 0, column 0"),
        "{refused}"
    );
    let mut wrong = right;
    let dx = wrong.dx.as_mut().unwrap().iter_mut().find(|dx| dx.rows() > 0).unwrap();
    dx.as_mut_slice::<f32>().unwrap()[0] = f32::NAN;
    assert!(check(&wrong).unwrap_err().to_string().contains("dx of rank"));
}

/// A whole mixture, with a router's weights and an activation in between: the dense definition, in which every token knows all experts.
#[test]
fn a_mixture_of_experts_is_its_dense_definition() {
    let (ranks, experts, hidden, inner) = (2, 4, 6, 10);
    let mut seed = 3;
    let routing = Arc::new(random_routing(&mut seed, ranks, experts, 3));
    let gate = |rank: usize, token: usize, expert: usize| 0.1 + ((rank * 31 + token * 7 + expert) % 9) as f64;
    let (up, down) = (
        random_tensor(vec![experts * inner, hidden], DType::F64, 1),
        random_tensor(vec![experts * hidden, inner], DType::F64, 2),
    );
    let x: Vec<HostTensor> = (0..ranks)
        .map(|rank| random_tensor(vec![routing.tokens(rank), hidden], DType::F64, 10 + rank as u64))
        .collect();
    let group = Group::local(ranks, WorldConfig::default()).unwrap();
    let layer = |kind, in_features, out_features, weight: &HostTensor| {
        let options = ExpertOptions {
            spec: ExpertSpec { kind, in_features, out_features, dtype: DType::F64 },
            experts,
            gradient: WeightGradient::Frozen,
            capacity: ExpertCapacity::default(),
            overlap: ExpertOverlap::Passes(ExpertPasses {
                forward: pass("signals", 3),
                backward: pass("concurrent", 3),
            }),
        };
        let mut layer = ExpertLayer::new(&group, options).unwrap();
        let parts = layer.scatter_weight(weight).unwrap();
        layer.bind_weight(&parts).unwrap();
        layer.route(routing.clone()).unwrap();
        layer
    };
    let mut first = layer(ExpertKind::Dispatch, hidden, inner, &up);
    let mut second = layer(ExpertKind::Combine, inner, hidden, &down);
    let parts = first.upload("x", x.clone()).unwrap();
    let rows = first.forward(&parts).unwrap().result;
    let mut rows = first.download(&rows).unwrap();
    for (rank, rows) in rows.iter_mut().enumerate() {
        let mut of_row = rows.as_mut_slice::<f64>().unwrap().chunks_exact_mut(inner);
        for expert in routing.experts_of(rank).start..routing.experts_of(rank).end {
            for source in 0..ranks {
                for token in 0..routing.tokens(source) {
                    if routing.experts_of_token(source, token).contains(&(expert as u32)) {
                        let row = of_row.next().unwrap();
                        row.iter_mut().for_each(|h| *h = h.max(0.0) * gate(source, token, expert));
                    }
                }
            }
        }
        assert!(of_row.next().is_none());
    }
    let parts = second.upload("x", rows).unwrap();
    let y = second.forward(&parts).unwrap().result;
    let y = second.download(&y).unwrap();
    let (up, down) = (up.to_f64(), down.to_f64());
    let mut compared = 0;
    for rank in 0..ranks {
        let x = x[rank].to_f64();
        for token in 0..routing.tokens(rank) {
            let x = &x[token * hidden..][..hidden];
            let mut wanted = vec![0.0; hidden];
            for expert in 0..experts {
                // Dense: an expert that was not chosen has the weight 0.
                let chosen = routing.experts_of_token(rank, token).contains(&(expert as u32));
                let gate = if chosen { gate(rank, token, expert) } else { 0.0 };
                let inside = (0..inner).map(|feature| {
                    let weight = &up[(expert * inner + feature) * hidden..][..hidden];
                    x.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>().max(0.0) * gate
                });
                let inside: Vec<f64> = inside.collect();
                for (feature, wanted) in wanted.iter_mut().enumerate() {
                    let weight = &down[(expert * hidden + feature) * inner..][..inner];
                    *wanted += inside.iter().zip(weight).map(|(h, w)| h * w).sum::<f64>();
                }
            }
            for (found, wanted) in y[rank].to_f64()[token * hidden..][..hidden].iter().zip(wanted) {
                assert!((found - wanted).abs() < 1e-11 * (1.0 + wanted.abs()), "{found} {wanted}");
                compared += 1;
            }
        }
    }
    assert!(compared > 100, "{compared}");
}

/// One layer, a routing a step: of other tokens, with all rows at one expert, and none at all.
#[test]
fn routings_change_from_step_to_step() {
    let mut case = Case::random(1, ExpertKind::Dispatch, DType::F32);
    let (ranks, experts) = (case.routing.ranks(), case.routing.experts());
    let group = Group::local(ranks, WorldConfig::default()).unwrap();
    let mut layer = case.layer(&group, pass("concurrent", 3));
    let weight = layer.scatter_weight(&case.inputs.weight).unwrap();
    layer.bind_weight(&weight).unwrap();
    let one = |expert: u32, tokens: usize| vec![vec![expert; tokens]; ranks];
    for ids in [one(0, 9), one(experts as u32 - 1, 4), one(NONE, 5), one(0, 0)] {
        case.routing = Arc::new(Routing::top_k(experts, 1, &ids).unwrap());
        case.inputs.x = (0..ranks)
            .map(|rank| random_tensor(vec![ids[rank].len(), case.spec.in_features], DType::F32, rank as u64))
            .collect();
        layer.route(case.routing.clone()).unwrap();
        let x = layer.upload("x", case.inputs.x.clone()).unwrap();
        let y = layer.forward(&x).unwrap().result;
        let outputs = ExpertOutputs { y: layer.download(&y).unwrap(), dx: None, dweight: None };
        check_experts(&case.spec, &case.routing, &case.inputs, &outputs, LinearSample::Whole).unwrap();
    }
}

/// A sentence, and the layer goes on with the routing that it had.
#[test]
fn what_does_not_fit_is_refused_and_loses_nothing() {
    let group = Group::local(2, WorldConfig::default()).unwrap();
    let spec = ExpertSpec { kind: ExpertKind::Dispatch, in_features: 3, out_features: 2, dtype: DType::F32 };
    let options = ExpertOptions {
        spec,
        experts: 4,
        gradient: WeightGradient::Written,
        capacity: ExpertCapacity { tokens: Some(4), rows_of_expert: Some(3), rows_of_rank: Some(5) },
        overlap: ExpertOverlap::Passes(ExpertPasses::default()),
    };
    let refused = |options| ExpertLayer::new(&group, options).err().unwrap().to_string();
    assert!(refused(ExpertOptions { experts: 3, ..options }).contains("3 experts for 2 ranks"));
    let deferred = ExpertOptions { gradient: WeightGradient::Deferred, ..options };
    assert!(refused(deferred).contains("defer"));
    let replaced = ExpertOptions { gradient: WeightGradient::Replaced(DType::F32), ..options };
    assert!(refused(replaced).contains("replace"));
    let empty = ExpertSpec { in_features: 0, ..spec };
    assert!(refused(ExpertOptions { spec: empty, ..options }).contains("no features"));
    let mut layer = ExpertLayer::new(&group, options).unwrap();
    let weight = layer.scatter_weight(&random_tensor(vec![8, 3], DType::F32, 1)).unwrap();
    layer.bind_weight(&weight).unwrap();
    let input = |tokens| random_tensor(vec![tokens, 3], DType::F32, 2);
    let x = layer.upload("x", vec![input(2), input(1)]).unwrap();
    let refused = layer.forward(&x).err().unwrap().to_string();
    assert!(refused.contains("routing") && refused.contains("missing"), "{refused}");

    let top = |experts, ids: &[Vec<u32>]| Arc::new(Routing::top_k(experts, 1, ids).unwrap());
    layer.route(top(4, &[vec![0, 3], vec![1]])).unwrap();
    let before = layer.forward(&x).unwrap().result;
    let before = layer.download(&before).unwrap();
    let mut refused = |routing| {
        let error = layer.route(routing).err().unwrap();
        assert!(matches!(error, ExecError::Tensor { .. }));
        error.to_string()
    };
    assert!(refused(top(4, &[vec![2; 5], vec![]])).contains("rank 0 has 5 tokens, and its capacity is 4"));
    assert!(
        refused(top(4, &[vec![2; 4], vec![]])).contains("expert 2 is given 4 rows, and its capacity is 3")
    );
    let full = top(4, &[vec![0, 0, 0, 1], vec![1, 1]]);
    assert!(refused(full.clone()).contains("the experts of rank 0 are given 6 rows, and its capacity is 5"));
    assert!(refused(top(8, &[vec![0], vec![]])).contains("8 experts on 2 ranks"));
    assert!(refused(top(4, &vec![vec![]; 4])).contains("on 4 ranks"));
    // What is left as it was still runs; another number of rows than was routed is no input.
    let after = layer.forward(&x).unwrap().result;
    assert_eq!(layer.download(&after).unwrap(), before);
    let more = layer.upload("x", vec![input(3), input(1)]).unwrap();
    assert!(layer.forward(&more).err().unwrap().to_string().contains('x'));
    let after = layer.forward(&x).unwrap().result;
    assert_eq!(layer.download(&after).unwrap(), before);
    assert_eq!(full.within(2).0.rows(), [2, 2, 0, 0]);
}

/// A policy that CPU ranks cannot follow is refused when the layer is given a routing.
#[test]
fn policies_that_nothing_runs_are_refused() {
    let case = Case::random(2, ExpertKind::Dispatch, DType::F32);
    let group = Group::local(case.routing.ranks(), WorldConfig::default()).unwrap();
    let partition = OverlapPolicy {
        workers: counterpoint_schedule::WorkerShare::Partition(1),
        ..OverlapPolicy::default()
    };
    let mut layer = case.layer(&group, ExpertPass { policy: partition, groups: ExpertGroups::even(2) });
    assert!(layer.route(case.routing.clone()).is_err());
}

/// By default a layer runs as it was tuned for as many tokens and rows, where it was; a policy that is named has the groups that were tuned
/// for it.
#[test]
fn layers_run_as_they_were_tuned() {
    let (ranks, experts, spec) =
        (2, 4, ExpertSpec { kind: ExpertKind::Dispatch, in_features: 3, out_features: 2, dtype: DType::F32 });
    let routing = |tokens| {
        Arc::new(
            Routing::random(RandomRouting { experts, choices: 2, ranks, tokens, skew: 0.0, seed: 1 })
                .unwrap(),
        )
    };
    let place = TunedPlace { device: "X".to_owned(), transport: "threads".to_owned() };
    let mut plans = TunedPlans::default();
    for (policy, count, seconds) in [("signals", 3, 0.5), ("concurrent", 2, 0.7), ("copy-engine", 4, 0.1)] {
        let topology = Topology::flat(ranks);
        let shape = TunedExpertShape::of(&spec, &routing(12), TunedPass::Forward, topology, &place).unwrap();
        let (groups, search) = (ExpertGroups { count, growth: 150 }, GroupSearch::Predictive);
        let policy = policy.to_owned();
        plans.experts.insert(TunedExperts {
            shape,
            policy,
            groups,
            seconds,
            sequential_seconds: 1.0,
            search,
        });
    }
    let group = Group::local(ranks, WorldConfig::default()).unwrap();
    let group = group.with_tuned(Arc::new(TunedHere { place, plans }));
    let passes = |overlap, tokens| {
        let (gradient, capacity) = (WeightGradient::Frozen, ExpertCapacity::default());
        let mut layer =
            ExpertLayer::new(&group, ExpertOptions { spec, experts, gradient, capacity, overlap }).unwrap();
        assert!(layer.passes().is_none());
        layer.route(routing(tokens)).unwrap();
        layer.passes().unwrap()
    };
    // CPU ranks have no copy engines.
    let tuned = pass("signals", 3);
    let tuned = ExpertPass { groups: ExpertGroups { growth: 150, ..tuned.groups }, ..tuned };
    assert_eq!(passes(ExpertOverlap::default(), 12).forward, tuned);
    assert_ne!(passes(ExpertOverlap::default(), 12).backward, tuned);
    assert_ne!(passes(ExpertOverlap::default(), 11).forward, tuned);
    let named = passes(ExpertOverlap::Policy("concurrent".parse().unwrap()), 12).forward;
    assert_eq!(named.groups, ExpertGroups { count: 2, growth: 150 });
}

/// With a capacity the group has all memory from the first routing on, however few rows that has; without one it grows.
#[test]
fn routings_within_a_capacity_need_no_more_memory() {
    const TOKENS: usize = 24;
    // One token, with two experts of a rank, as many of the others'.
    let few = Arc::new(Routing::top_k(4, 2, &[vec![0, 1], vec![]]).unwrap());
    // Of the most tokens all go to two experts of a rank, or one after the other.
    let all = |experts: &[u32]| {
        let ids = vec![experts.repeat(2 * TOKENS / experts.len()); 2];
        Arc::new(Routing::top_k(4, 2, &ids).unwrap())
    };
    let more = [all(&[0, 1]), all(&[2, 3]), all(&[0, 1, 2, 3])];
    let (policy, groups) = (OverlapPolicy::default(), ExpertGroups { count: 3, growth: 50 });
    let pass = ExpertPass { policy, groups };
    let layer = |group: &Group<CpuMachine>, kind, capacity| {
        let spec = ExpertSpec { kind, in_features: 3, out_features: 2, dtype: DType::Bf16 };
        let overlap = ExpertOverlap::Passes(ExpertPasses { forward: pass, backward: pass });
        let options =
            ExpertOptions { spec, experts: 4, gradient: WeightGradient::Written, capacity, overlap };
        ExpertLayer::new(group, options).unwrap()
    };
    let kinds = [ExpertKind::Dispatch, ExpertKind::Combine];
    // Scratch memory once all passes have been ready for a few tokens, and then pass by pass.
    let scratch = |capacity: ExpertCapacity| -> Vec<u64> {
        let group = Group::local(2, WorldConfig::default()).unwrap();
        let mut layers = kinds.map(|kind| layer(&group, kind, capacity));
        let mut bytes = Vec::new();
        for routing in [&few].into_iter().chain(&more) {
            for layer in &mut layers {
                for call in [LayerCall::Forward, LayerCall::Backward] {
                    layer.route_for(routing.clone(), call, None).unwrap();
                    bytes.push(group.scratch_bytes());
                }
            }
        }
        group.close().unwrap();
        bytes.split_off(3)
    };
    let rows = 2 * 2 * TOKENS;
    let capacity = ExpertCapacity { tokens: Some(TOKENS), rows_of_rank: Some(rows), rows_of_expert: None };
    let within = scratch(capacity);
    assert!(within[0] > 0 && within.iter().all(|bytes| *bytes == within[0]), "{within:?}");
    let grown = scratch(ExpertCapacity::default());
    assert!(grown[0] < within[0] && grown[0] < grown[grown.len() - 1], "{grown:?}");

    // More than there is: a sentence, before anything is allocated.
    let group = Group::local(2, WorldConfig::default()).unwrap();
    for rows in [usize::MAX, 1 << 50] {
        let capacity = ExpertCapacity { rows_of_rank: Some(rows), ..ExpertCapacity::default() };
        let error = layer(&group, ExpertKind::Dispatch, capacity).route(few.clone()).unwrap_err();
        assert!(matches!(error, ExecError::OutOfMemory { .. }), "{error}");
    }
}
