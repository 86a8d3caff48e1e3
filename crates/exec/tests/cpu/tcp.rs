//! Attention between ranks that join through TCP, each in a world of its own: the bits of threads, and faults.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_choose::{PlanConfig, StageCount, plan_mask};
use counterpoint_exec::{
    AttentionInputs, AttentionRun, Communicator, CpuBuffer, ExecError, FaultInjection, FaultKind, FaultPoint,
    Handle, HostTensor, Machine, Pass, RunConfig, Stall, TcpLoopback, World, WorldConfig, random_inputs,
    run_attention, run_attention_on,
};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, GroupPart, Plan};
use counterpoint_schedule::SpanKind;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

struct Problem {
    spec: AttentionSpec,
    plan: Plan,
    inputs: AttentionInputs,
}

impl Problem {
    fn new(ranks: usize, dtype: DType) -> Self {
        let slice = |start, end, mask_type| {
            let all = Range::new(start, end);
            AttnSlice::new(all, all, mask_type)
        };
        let slices = vec![slice(0, 130, MaskType::Causal), slice(130, 320, MaskType::Full)];
        let mask = Mask::new(320, 320, slices).unwrap();
        let spec = AttentionSpec {
            heads_q: 4,
            heads_kv: 2,
            head_dim: 16,
            head_dim_v: 8,
            dtype,
            scale: 0.25,
            softcap: 0.0,
            seqlen_sink: 2,
            gradient_shares: GradientShares::Accumulators,
            max_logits: false,
            dlse: false,
        };
        let config = PlanConfig {
            chunk_size: Some(16),
            stages: StageCount::Fixed(3).into(),
            ..PlanConfig::new(ranks)
        };
        let plan = plan_mask(&mask, &spec, &config).unwrap();
        let inputs = random_inputs(&mask, &spec, 11, Pass::ForwardBackward);
        Self { spec, plan, inputs }
    }

    fn through_tcp(&self, config: &RunConfig) -> Result<AttentionRun, ExecError> {
        run_attention_on(&TcpLoopback::default(), &self.plan, &self.spec, &self.inputs, config)
    }

    /// Runs under a fault; gives the error and how long the call took.
    fn under(&self, fault: FaultInjection, limit: Duration) -> (ExecError, Duration) {
        let began = Instant::now();
        let config = RunConfig::default().with_faults(vec![fault]).with_limit(limit);
        (self.through_tcp(&config).unwrap_err(), began.elapsed())
    }
}

#[test]
fn results_are_those_of_threads_to_the_last_bit() {
    for (ranks, dtype) in [(1, DType::F32), (2, DType::Bf16), (3, DType::F64), (5, DType::F16)] {
        let problem = Problem::new(ranks, dtype);
        for deterministic in [false, true] {
            let config =
                RunConfig { deterministic, ..RunConfig::default() }.with_limit(Duration::from_secs(60));
            let here = run_attention(&problem.plan, &problem.spec, &problem.inputs, &config).unwrap();
            let there = problem.through_tcp(&config).unwrap();
            assert_eq!(there.outputs, here.outputs, "{ranks} ranks, {dtype:?}");
            let done = |run: &AttentionRun| {
                run.forward.spans.iter().filter(|span| span.kind != SpanKind::Wait).count()
            };
            assert_eq!(done(&there), done(&here));
        }
    }
}

#[test]
fn a_panic_of_any_rank_anywhere_is_the_error_of_all() {
    let problem = Problem::new(3, DType::F32);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for round in 0..8 {
        let rank = rng.random_range(0..3);
        let at = FaultPoint::Op(rng.random_range(0..12));
        let fault = FaultInjection { rank, program: None, at: at.clone(), kind: FaultKind::Panic };
        let (error, elapsed) = problem.under(fault, Duration::from_secs(60));
        let named = matches!(&error, ExecError::RankPanicked { rank: panicked, .. } if *panicked == rank);
        assert!(named, "round {round}, rank {rank} at {at:?}: {error}");
        assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
    }
}

#[test]
fn a_stall_is_blamed_on_its_rank_across_processes() {
    let problem = Problem::new(3, DType::F32);
    let blames = |rank, label: &str, stage| {
        let at = FaultPoint::Label { label: label.to_owned(), stage: Some(stage) };
        let kind = FaultKind::Stall(Duration::from_secs(14));
        let (error, elapsed) =
            problem.under(FaultInjection { rank, program: None, at, kind }, Duration::from_secs(4));
        let ExecError::Stalled(stall) = &error else { panic!("{error}") };
        let Stall { culprit, culprit_doing, .. } = &**stall;
        assert_eq!(*culprit, rank, "{error}");
        assert!(culprit_doing.contains(&format!("has been in `{label}` (stage {stage})")), "{error}");
        assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
    };
    // Each waits until the limit is over, so they wait together.
    thread::scope(|scope| {
        for (rank, label, stage) in [(1, "cast k v", 1), (2, "cast k v", 2), (1, "attention forward", 1)] {
            let blames = &blames;
            scope.spawn(move || blames(rank, label, stage));
        }
    });
}

/// Issues one group-cast on each of two ranks, of a label and with a part of its own; gives both ranks' errors.
fn disagreement(labels: [&str; 2], parts: [GroupPart; 2]) -> Vec<ExecError> {
    let machine = TcpLoopback::default();
    let config = WorldConfig { limit: Duration::from_secs(30), ..WorldConfig::default() };
    let ends = machine.connect(&World::new(2, config)).unwrap();
    let ranks: Vec<_> =
        ends.into_iter().map(|(backend, end)| Communicator::new(backend, end).unwrap()).collect();
    let began = Instant::now();
    let rows = |rank| CpuBuffer::new(rank, "rows", HostTensor::zeros(vec![4, 2], DType::F32));
    let handles: Vec<_> = (0..2)
        .map(|rank| {
            ranks[rank].group_cast(labels[rank], &parts[rank], &[(&rows(rank), &rows(rank))], DType::F32)
        })
        .collect();
    let errors =
        handles.into_iter().map(|handle| handle.and_then(Handle::synchronize).unwrap_err()).collect();
    assert!(began.elapsed() < Duration::from_secs(20), "the limit was waited for");
    errors
}

#[test]
fn ranks_that_disagree_are_named_at_once() {
    let send = || GroupPart::from_splits([(3, &[1u32][..])], []);
    let receive = |rows| GroupPart::from_splits([], [(rows, 0)]);
    for error in disagreement(["cast k", "cast v"], [send(), receive(3)]) {
        assert!(matches!(error, ExecError::CollectiveOrder { sequence: 0, .. }), "{error}");
        assert!(error.to_string().contains("`cast k`") && error.to_string().contains("`cast v`"), "{error}");
    }
    for error in disagreement(["cast", "cast"], [send(), receive(2)]) {
        assert!(matches!(error, ExecError::CollectiveMismatch { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 0 sends splits of [3] rows and rank 1 expects [2]"), "{text}");
    }
    // A part that makes no sense is its rank's error, before anything is sent; the other hears why nothing comes.
    let errors = disagreement(["cast", "cast"], [GroupPart::from_splits([(9, &[1u32][..])], []), receive(4)]);
    for error in errors {
        assert!(error.to_string().starts_with("rank 0 cannot take part in `cast`"), "{error}");
    }
}
