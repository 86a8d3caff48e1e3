//! Distributed attention, tensors to tensors, against the dense f64 reference.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_choose::{DispatchAlgorithm, PassStages, PlanConfig, StageCount, plan_mask};
use counterpoint_exec::{
    AttentionInputs, AttentionRun, CpuBackend, CpuBuffer, CpuMachine, CpuTransport, ExecError,
    FaultInjection, FaultKind, FaultPoint, HostTensor, Measurement, Pass, Prepared, PreparedAttention,
    RankProblem, RanksRun, RunConfig, SlowLink, SlowNetwork, World, WorldConfig, run_attention,
};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, Plan, Topology};
use counterpoint_reference::check_attention;
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, SpanKind, StartOrder, lower_attention_backward,
    lower_attention_forward,
};
use half::{bf16, f16};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{self, random_mask, spec};

pub(super) const DISPATCHES: [DispatchAlgorithm; 4] = [
    DispatchAlgorithm::Affinity,
    DispatchAlgorithm::MinHeap,
    DispatchAlgorithm::Sequential,
    DispatchAlgorithm::Zigzag,
];

pub(super) fn config(
    cp_size: usize,
    chunk_size: usize,
    stages: StageCount,
    dispatch: DispatchAlgorithm,
) -> PlanConfig {
    PlanConfig { chunk_size: Some(chunk_size), stages: stages.into(), dispatch, ..PlanConfig::new(cp_size) }
}

pub(super) fn inputs(mask: &Mask, spec: &AttentionSpec, rng: &mut ChaCha8Rng) -> AttentionInputs {
    match spec.dtype {
        DType::F64 => support::inputs::<f64>(mask, spec, 1.0, rng),
        DType::F32 => support::inputs::<f32>(mask, spec, 1.0, rng),
        DType::Bf16 => support::inputs::<bf16>(mask, spec, 1.0, rng),
        DType::F16 => support::inputs::<f16>(mask, spec, 1.0, rng),
    }
}

fn run(plan: &Plan, spec: &AttentionSpec, inputs: &AttentionInputs, run: &RunConfig) -> AttentionRun {
    run_attention(plan, spec, inputs, run).unwrap_or_else(|error| panic!("{error}"))
}

pub(super) fn causal(seqlen: usize) -> Mask {
    let whole = Range::new(0, seqlen);
    Mask::new(seqlen, seqlen, vec![AttnSlice::new(whole, whole, MaskType::Causal)]).unwrap()
}

fn policy(start: StartOrder) -> OverlapPolicy {
    OverlapPolicy::new(start)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every mask, any number of ranks (more than chunks, too), chunks that do not divide, every dispatch, any number of
    /// stages in each pass, every policy, every dtype, GQA, sink, softcap, with the largest logits and a gradient of lse or without.
    #[test]
    fn forward_and_backward_are_right(
        seed: u64,
        seqlens in (1usize..400, 1usize..400, any::<bool>()),
        cp_size in 1usize..9,
        chunk_size in 1usize..90,
        stages in prop::array::uniform2(prop_oneof![Just(StageCount::Auto), (0usize..8).prop_map(StageCount::Fixed)]),
        algorithm in 0usize..4,
        order in 0usize..4,
        dtype in 0usize..4,
        heads in prop_oneof![Just((1, 1)), Just((4, 1)), Just((6, 2)), Just((2, 2))],
        dims in prop_oneof![Just((16, 16)), Just((64, 64)), Just((5, 7))],
        sink in 0usize..3,
        softcap in prop_oneof![Just(0.0), Just(3.0)],
        deterministic: bool,
        nodes in 1usize..4,
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (seqlen_q, other, self_attention) = seqlens;
        let seqlen_k = if self_attention { seqlen_q } else { other };
        let mask = random_mask(seqlen_q, seqlen_k, &mut rng);
        let dtype = [DType::F64, DType::F32, DType::Bf16, DType::F16][dtype];
        let spec = AttentionSpec {
            softcap, seqlen_sink: sink, max_logits: seed % 2 == 0, dlse: seed % 3 == 0,
            ..spec(heads.0, heads.1, dims.0, dims.1, dtype)
        };
        let topology = Topology { world_size: cp_size, ranks_per_node: cp_size.div_ceil(nodes) };
        let [forward, backward] = stages;
        let config = PlanConfig {
            topology,
            stages: PassStages { forward, backward },
            ..config(cp_size, chunk_size, forward, DISPATCHES[algorithm])
        };
        let plan = plan_mask(&mask, &spec, &config).unwrap().over_nodes(&topology);
        let inputs = inputs(&mask, &spec, &mut rng);
        let run_config = RunConfig {
            policy: policy(StartOrder::ALL[order]).into(), deterministic, ..RunConfig::default()
        };
        let run = run(&plan, &spec, &inputs, &run_config);
        let report = check_attention(&mask, &spec, &inputs, &run.outputs);
        prop_assert!(report.passed, "{:#?}", report);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    /// Any policy, number of stages and repetition: the same bits.
    #[test]
    fn deterministic_runs_are_bit_equal(
        seed: u64, cp_size in 1usize..7, ranks_per_node in 1usize..7, bf16 in any::<bool>(),
    ) {
        let topology = Topology { world_size: cp_size, ranks_per_node: ranks_per_node.min(cp_size) };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let seqlen = rng.random_range(300..900);
        let mask = if rng.random_bool(0.5) { causal(seqlen) } else { random_mask(seqlen, seqlen, &mut rng) };
        let spec = AttentionSpec {
            seqlen_sink: 1, max_logits: true, dlse: true,
            ..spec(4, 2, 16, 16, if bf16 { DType::Bf16 } else { DType::F32 })
        };
        let inputs = inputs(&mask, &spec, &mut rng);
        let mut first = None;
        for (order, stages) in [(0, 1), (1, 1), (1, 2), (2, 3), (1, 5), (1, 2)] {
            let stages = StageCount::Fixed(stages);
            let config = PlanConfig { topology, ..config(cp_size, 64, stages, DispatchAlgorithm::MinHeap) };
            let plan = plan_mask(&mask, &spec, &config).unwrap().over_nodes(&topology);
            let start = StartOrder::ALL[order];
            let run_config = RunConfig { policy: policy(start).into(), deterministic: true, ..RunConfig::default() };
            let outputs = run(&plan, &spec, &inputs, &run_config).outputs;
            let first = first.get_or_insert_with(|| outputs.clone());
            prop_assert!(*first == outputs, "{:?} {:?}", start, stages);
        }
    }

    /// All work at once, after everything has arrived, gives those bits too, in whole blocks as stages are cut.
    #[test]
    fn all_work_at_once_changes_no_bit(seed: u64, cp_size in 2usize..5, causally: bool, bf16: bool) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let seqlen = 256 * cp_size;
        let mask = if causally { causal(seqlen) } else { random_mask(seqlen, seqlen, &mut rng) };
        let spec = AttentionSpec {
            seqlen_sink: 1, ..spec(4, 2, 16, 8, if bf16 { DType::Bf16 } else { DType::F32 })
        };
        let inputs = inputs(&mask, &spec, &mut rng);
        let outputs_of = |stages, deterministic| {
            let stages = StageCount::Fixed(stages);
            let config = config(cp_size, 128, stages, DispatchAlgorithm::MinHeap);
            let plan = plan_mask(&mask, &spec, &config).unwrap();
            let own = plan.ranks.iter().flat_map(|rank| rank.backward.get(1)).map(|stage| stage.own_rows);
            assert!(own.clone().all(|rows| rows == if stages == StageCount::Fixed(0) { 256 } else { 0 }));
            let run_config = RunConfig { deterministic, ..RunConfig::default() };
            run(&plan, &spec, &inputs, &run_config).outputs
        };
        let at_once = outputs_of(0, true);
        prop_assert!([1, 2].iter().all(|&stages| outputs_of(stages, true) == at_once));
        // The reference takes longer than all of these. Runs in stages are judged above, in that mode too, and these bits are theirs;
        // without it they are of their own.
        if seed % 2 == 0 {
            let report = check_attention(&mask, &spec, &inputs, &outputs_of(0, false));
            prop_assert!(report.passed, "{:#?}", report);
        }
    }

    /// Without that mode, too, the order of sums is the plan's, not that of arrival: delays change no bit.
    #[test]
    fn delays_change_no_bit(seed: u64, cp_size in 2usize..6, order in 0usize..4) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let seqlen = rng.random_range(100..400);
        let mask = random_mask(seqlen, seqlen, &mut rng);
        let spec = spec(2, 1, 16, 16, DType::F32);
        let inputs = inputs(&mask, &spec, &mut rng);
        let plan = plan_mask(&mask, &spec, &config(cp_size, 16, StageCount::Fixed(3), DispatchAlgorithm::MinHeap)).unwrap();
        let quiet = RunConfig { policy: policy(StartOrder::ALL[order]).into(), ..RunConfig::default() };
        let expected = run(&plan, &spec, &inputs, &quiet).outputs;
        for round in 0..3 {
            let delay = FaultKind::Delay { seed: seed ^ round, max: Duration::from_micros(300) };
            let fault = |rank| FaultInjection { rank, program: None, at: FaultPoint::Everywhere, kind: delay };
            let disturbed = quiet.clone().with_faults((0..cp_size).map(fault).collect());
            prop_assert!(run(&plan, &spec, &inputs, &disturbed).outputs == expected);
        }
    }

    /// A rank that panics at any operation ends the run at once, and is named.
    #[test]
    fn a_panic_ends_the_run_and_names_the_rank(seed: u64, rank in 0usize..3, op in 0usize..1000) {
        fault_ends_the_run(FaultKind::Panic, [rank, op], seed);
    }
}

/// One that stalls ends it within the limit, and is named. Each waits until the limit is over, so they wait together.
#[test]
fn a_stall_ends_the_run_and_names_the_rank() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..3 {
        let cases: [_; 3] = std::array::from_fn(|_| [rng.random_range(0..3), rng.random_range(0..1000)]);
        thread::scope(|scope| {
            for place in cases {
                scope.spawn(move || {
                    fault_ends_the_run(FaultKind::Stall(Duration::from_secs(12)), place, seed)
                });
            }
        });
    }
}

/// Runs under a fault of `rank` in the backward's operation `op`, counted from the first again after the last.
fn fault_ends_the_run(kind: FaultKind, [rank, op]: [usize; 2], seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mask = causal(256);
    let spec = spec(2, 1, 16, 16, DType::F32);
    let config = config(3, 16, StageCount::Fixed(2), DispatchAlgorithm::MinHeap);
    let plan = plan_mask(&mask, &spec, &config).unwrap();
    let inputs = inputs(&mask, &spec, &mut rng);
    let reduction = GradientReduction::PerStage;
    let ops = lower_attention_backward(&plan, rank, &spec, OverlapPolicy::default(), reduction).ops.len();
    let op = op % ops;
    let stalls = matches!(kind, FaultKind::Stall(_));
    let fault =
        FaultInjection { rank, program: Some("attention backward".to_owned()), at: FaultPoint::Op(op), kind };
    let limit = Duration::from_millis(if stalls { 1_500 } else { 60_000 });
    let run_config = RunConfig::default().with_limit(limit).with_faults(vec![fault]);
    let began = Instant::now();
    let error = run_attention(&plan, &spec, &inputs, &run_config).map(drop).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    match &error {
        ExecError::RankPanicked { rank: blamed, .. } if !stalls => assert_eq!(*blamed, rank),
        ExecError::Stalled(reason) if stalls => assert_eq!(reason.culprit, rank, "operation {op}: {error}"),
        other => panic!("rank {rank}, operation {op}: {other}"),
    }
}

/// As many times as runs were asked for, each of something that took time; results do not change.
#[test]
fn every_measured_run_has_its_time() {
    let spec = spec(2, 1, 16, 16, DType::F32);
    let mask = causal(64);
    let plan =
        plan_mask(&mask, &spec, &config(2, 16, StageCount::Fixed(1), DispatchAlgorithm::Affinity)).unwrap();
    let inputs = counterpoint_exec::random_inputs(&mask, &spec, 3, Pass::ForwardBackward);
    let once = run(&plan, &spec, &inputs, &RunConfig::default());
    let config = RunConfig {
        measurement: Measurement { warmups: 2, samples: 3, ..Measurement::default() },
        ..RunConfig::default()
    };
    let often = run(&plan, &spec, &inputs, &config);
    assert_eq!((once.forward_seconds.len(), once.backward_seconds.len()), (1, 1));
    assert_eq!((often.forward_seconds.len(), often.backward_seconds.len()), (3, 3));
    assert!(often.forward_seconds.iter().chain(&often.backward_seconds).all(|&seconds| seconds > 0.0));
    assert_eq!(often.forward_seconds[2], often.forward.duration());
    assert_eq!(once.outputs.out, often.outputs.out);
}

/// Ranks that planned from different masks find out in their first collective.
#[test]
fn ranks_with_different_masks_are_named() {
    let spec = spec(2, 1, 16, 16, DType::F32);
    let config = config(2, 16, StageCount::Fixed(1), DispatchAlgorithm::Sequential);
    let whole = Range::new(0, 64);
    let full = Mask::new(64, 64, vec![AttnSlice::new(whole, whole, MaskType::Full)]).unwrap();
    let world = World::new(2, WorldConfig::default());
    let workers = CpuBackend::workers(0).unwrap();
    let transports = CpuTransport::local(&world, None).into_iter();
    let mut ranks: Vec<_> = [causal(64), full]
        .iter()
        .zip(transports)
        .enumerate()
        .map(|(rank, (mask, transport))| {
            let plan = plan_mask(mask, &spec, &config).unwrap();
            let program =
                lower_attention_forward(&plan, rank, &spec, OverlapPolicy::default(), KeyBlocks::Unaligned);
            let backend = CpuBackend::new(&world, rank, workers.clone());
            let mut prepared = Prepared::new(program, backend, transport).unwrap();
            for (name, heads) in [("q", 2), ("k", 1), ("v", 1)] {
                let tensor = HostTensor::zeros(vec![32, heads, 16], DType::F32);
                prepared.bind(name, CpuBuffer::new(rank, name, tensor)).unwrap();
            }
            prepared
        })
        .collect();
    let error = Prepared::run_ranks(&mut ranks).unwrap_err();
    assert!(matches!(error, ExecError::CollectiveMismatch { .. }), "{error}");
    let reason = "rank 1 sends splits of [32] rows and rank 0 expects []";
    assert!(error.to_string().contains(reason), "{error}");
}

#[test]
fn what_was_not_asked_for_is_not_computed() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mask = causal(100);
    let spec = spec(2, 2, 8, 8, DType::F32);
    let plan =
        plan_mask(&mask, &spec, &config(3, 16, StageCount::Auto, DispatchAlgorithm::Affinity)).unwrap();
    let inputs = AttentionInputs { dout: None, ..inputs(&mask, &spec, &mut rng) };
    let run = run(&plan, &spec, &inputs, &RunConfig::default());
    assert_eq!((run.outputs.dq, run.outputs.dk, run.backward), (None, None, None));
}

#[test]
fn the_number_of_ranks_does_not_matter() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mask = random_mask(333, 333, &mut rng);
    let spec = spec(4, 2, 16, 16, DType::F64);
    let inputs = inputs(&mask, &spec, &mut rng);
    for cp_size in [1, 2, 3, 8, 40, 200] {
        let plan =
            plan_mask(&mask, &spec, &config(cp_size, 32, StageCount::Auto, DispatchAlgorithm::Affinity))
                .unwrap();
        let run = run(&plan, &spec, &inputs, &RunConfig::default());
        let report = check_attention(&mask, &spec, &inputs, &run.outputs);
        assert!(report.passed, "{cp_size} ranks: {report:#?}");
    }
}

/// Rows that cross once for a node take less time than rows that cross for every rank, and the forward's bits are the same.
#[test]
fn two_levels_are_quicker_over_a_slow_network() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mask = Mask::full(1024).unwrap();
    let spec = spec(1, 1, 16, 16, DType::F32);
    let topology = Topology { world_size: 6, ranks_per_node: 3 };
    let config =
        PlanConfig { topology, ..config(6, 64, StageCount::Fixed(2), DispatchAlgorithm::Sequential) };
    let flat = plan_mask(&mask, &spec, &config).unwrap();
    let inputs = inputs(&mask, &spec, &mut rng);
    // A rank needs 512 rows of the other node: 0.3 s of the network, three times the node's share.
    let network = SlowNetwork {
        alpha: Duration::from_millis(1),
        bytes_per_second: 512.0 * spec.kv_row_bytes() as f64 / 0.3,
        topology,
    };
    let slow_link =
        Some(SlowLink { alpha: Duration::ZERO, bytes_per_second: f64::INFINITY, network: Some(network) });
    let run_config = RunConfig { slow_link, ..RunConfig::default() };
    let in_one = run(&flat, &spec, &inputs, &run_config);
    let in_two = run(&flat.over_nodes(&topology), &spec, &inputs, &run_config);
    assert_eq!((&in_one.outputs.out, &in_one.outputs.lse), (&in_two.outputs.out, &in_two.outputs.lse));
    assert!(check_attention(&mask, &spec, &inputs, &in_two.outputs).passed);
    for (one, two) in
        [(&in_one.forward, &in_two.forward), (&in_one.backward.unwrap(), &in_two.backward.unwrap())]
    {
        let (one, two) = (one.makespan(), two.makespan());
        assert!(two < 0.7 * one, "{two} s in two steps, {one} s in one");
    }
}

#[test]
fn the_timeline_shows_every_rank_and_stage() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mask = causal(512);
    let spec = spec(2, 2, 32, 32, DType::F32);
    let plan =
        plan_mask(&mask, &spec, &config(2, 32, StageCount::Fixed(2), DispatchAlgorithm::MinHeap)).unwrap();
    let inputs = inputs(&mask, &spec, &mut rng);
    let slow_link = Some(SlowLink { alpha: Duration::from_millis(5), bytes_per_second: 1e9, network: None });
    let run = run(&plan, &spec, &inputs, &RunConfig { slow_link, ..RunConfig::default() });
    for (timeline, stages) in
        [(run.forward, plan.ranks[0].forward.len()), (run.backward.unwrap(), plan.ranks[0].backward.len())]
    {
        assert_eq!(timeline.world_size, 2);
        for rank in 0..2 {
            for stage in 0..stages {
                let found = |kind| {
                    let mut spans = timeline.spans.iter();
                    spans.find(|s| s.rank == rank && s.stage == Some(stage) && s.kind == kind).cloned()
                };
                assert!(found(SpanKind::Compute).is_some(), "rank {rank} stage {stage}: {timeline:#?}");
                if stage > 0 {
                    let span = found(SpanKind::Communication).unwrap();
                    assert!(span.end - span.start >= 0.005, "{span:?}");
                }
            }
        }
        assert!(timeline.spans.iter().all(|span| 0.0 <= span.start && span.start <= span.end));
    }
}

#[test]
fn policies_that_cpu_ranks_cannot_follow_are_refused() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let (mask, spec) = (causal(64), spec(1, 1, 8, 8, DType::F32));
    let plan =
        plan_mask(&mask, &spec, &config(2, 16, StageCount::Auto, DispatchAlgorithm::Affinity)).unwrap();
    let inputs = inputs(&mask, &spec, &mut rng);
    for policy in ["partition=1", "priority", "single-connection", "kernel-barrier+copy-engine"] {
        let config = RunConfig { policy: policy.parse().unwrap(), ..RunConfig::default() };
        let error = run_attention(&plan, &spec, &inputs, &config).map(drop).unwrap_err();
        assert!(
            matches!(&error, ExecError::Policy { policy: named, .. } if named.contains(policy)),
            "{error}"
        );
    }
}

/// A step after a step on other tensors, with what one call from tensors to tensors gives; and what does not fit.
#[test]
fn attention_is_prepared_once_and_run_on_other_tensors() {
    let mask = causal(37);
    let spec = spec(4, 2, 8, 8, DType::F32);
    let plan =
        plan_mask(&mask, &spec, &config(3, 4, StageCount::Fixed(2), DispatchAlgorithm::Zigzag)).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(20);
    let given = [inputs(&mask, &spec, &mut rng), inputs(&mask, &spec, &mut rng)];
    let run = RunConfig { deterministic: true, ..RunConfig::default() };
    let machine = CpuMachine::new(0, None).unwrap();
    let problem = |pass| RankProblem { plan: &plan, spec: &spec, pass, host_bytes: given[0].bytes() };
    let of_ranks = given[0].of_ranks(&plan).unwrap();
    let both = problem(Pass::ForwardBackward);
    let mut attention = PreparedAttention::new(&machine, &both, &run, of_ranks.clone()).unwrap();
    for inputs in given.iter().rev() {
        type Rows = fn(&AttentionInputs) -> HostTensor;
        let tensors: [(&str, Rows); 4] = [
            ("q", |rank| rank.q.clone()),
            ("k", |rank| rank.k.clone()),
            ("v", |rank| rank.v.clone()),
            ("dout", |rank| rank.dout.clone().unwrap()),
        ];
        let ranks = inputs.of_ranks(&plan).unwrap();
        for (name, of) in tensors {
            let buffers = attention.upload(name, ranks.iter().map(of).collect()).unwrap();
            attention.bind(name, &buffers).unwrap();
        }
        attention.forward(&machine).unwrap();
        attention.backward(&machine).unwrap();
        let whole = RanksRun::of_outputs(attention.outputs().unwrap()).into_whole(&plan).unwrap();
        assert_eq!(whole.outputs, run_attention(&plan, &spec, inputs, &run).unwrap().outputs);
    }

    let buffers = attention.result("dq").unwrap();
    assert_eq!(buffers.len(), 3);
    let refused = |error: ExecError, words: &str| assert!(error.to_string().contains(words), "{error}");
    refused(attention.bind("q", &buffers[1..]).unwrap_err(), "2 ranks, of which 3");
    refused(attention.bind("weight", &buffers).unwrap_err(), "not an input");
    refused(attention.bind("out", &buffers).unwrap_err(), "not an input");
    refused(attention.bind("lse", &buffers).unwrap_err(), "not an input");
    refused(attention.bind("k", &buffers).unwrap_err(), "k");
    let mut forward = PreparedAttention::new(&machine, &problem(Pass::Forward), &run, of_ranks).unwrap();
    refused(forward.backward(&machine).unwrap_err(), "forward alone");
    refused(forward.result("dk").map(|_| ()).unwrap_err(), "forward alone");
}
