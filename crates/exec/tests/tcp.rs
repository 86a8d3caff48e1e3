//! Attention between ranks that meet through TCP, each in a world of its own: the bits of threads, and faults.

use std::time::{Duration, Instant};

use counterpoint_exec::{
    AttentionInputs, AttentionRun, ExecError, FaultInjection, FaultKind, FaultPoint, RunConfig, Stall,
    TcpLoopback, random_inputs, run_attention, run_attention_on,
};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::{
    AttentionSpec, CostModel, DType, DispatchAlgorithm, Plan, PlanConfig, StageCount, Topology,
};
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
        };
        let config = PlanConfig {
            chunk_size: Some(16),
            dispatch: DispatchAlgorithm::Affinity,
            stages: StageCount::Fixed(3),
            topology: Topology::flat(ranks),
            cost: CostModel::H200,
        };
        let plan = Plan::new(&mask, &spec, &config).unwrap();
        let inputs = random_inputs(&mask, &spec, 11, true);
        Self { spec, plan, inputs }
    }

    fn through_tcp(&self, config: &RunConfig) -> Result<AttentionRun, ExecError> {
        run_attention_on(&TcpLoopback::default(), &self.plan, &self.spec, &self.inputs, config)
    }

    /// Runs under a fault; gives the error and how long the call took.
    fn under(&self, fault: FaultInjection, limit: Duration) -> (ExecError, Duration) {
        let began = Instant::now();
        let config = RunConfig { faults: vec![fault], limit, ..RunConfig::default() };
        (self.through_tcp(&config).unwrap_err(), began.elapsed())
    }
}

#[test]
fn results_are_those_of_threads_to_the_last_bit() {
    for (ranks, dtype) in [(1, DType::F32), (2, DType::Bf16), (3, DType::F64), (5, DType::F16)] {
        let problem = Problem::new(ranks, dtype);
        for deterministic in [false, true] {
            let config = RunConfig { deterministic, limit: Duration::from_secs(60), ..RunConfig::default() };
            let here = run_attention(&problem.plan, &problem.spec, &problem.inputs, &config).unwrap();
            let there = problem.through_tcp(&config).unwrap();
            assert_eq!(there.outputs, here.outputs, "{ranks} ranks, {dtype:?}");
            assert_eq!(there.forward.spans.len(), here.forward.spans.len());
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
    for (rank, label, stage) in [(1, "cast kv", 1), (2, "cast kv", 2), (1, "attention", 1)] {
        let at = FaultPoint::Label { label: label.to_owned(), stage: Some(stage) };
        let kind = FaultKind::Stall(Duration::from_secs(14));
        let (error, elapsed) =
            problem.under(FaultInjection { rank, program: None, at, kind }, Duration::from_secs(4));
        let ExecError::Stalled(stall) = &error else { panic!("{error}") };
        let Stall { culprit, culprit_doing, .. } = &**stall;
        assert_eq!(*culprit, rank, "{error}");
        assert!(culprit_doing.contains(&format!("has been in `{label}` (stage {stage})")), "{error}");
        assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
    }
}
