//! The transport over MPI: this program starts itself again under `mpirun`, a process a rank.

use std::process::Command;
use std::time::{Duration, Instant};

use counterpoint_choose::{PlanConfig, StageCount, plan_mask};
use counterpoint_exec::{
    ExecError, FaultInjection, FaultKind, FaultPoint, Launch, MpiMachine, Pass, RankProblem, Rendezvous,
    RunConfig, random_inputs, run_attention, run_attention_ranks,
};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Plan};
use counterpoint_reference::selftest::{Extent, Share, selftest_collectives};

/// Runs one of the tests below in `ranks` processes; gives whether all passed, and what they said.
fn under_mpirun(ranks: usize, test: &str) -> (bool, String) {
    let began = Instant::now();
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap_or_else(|error| panic!("mpirun (Debian: openmpi-bin): {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(began.elapsed() < Duration::from_secs(240), "{:?}", began.elapsed());
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

fn join(limit: u64) -> std::sync::Arc<Rendezvous> {
    let launch = Launch::from_environment().unwrap().expect("mpirun's variables");
    Rendezvous::join_launched(&launch, &[], Duration::from_secs(limit)).unwrap()
}

#[test]
fn every_collective_is_as_on_threads() {
    for ranks in [2, 4] {
        let (passed, said) = under_mpirun(ranks, "collectives_of_a_rank");
        assert!(passed, "{ranks} ranks: {said}");
        assert_eq!(said.matches("collectives passed on rank").count(), ranks, "{said}");
    }
}

#[test]
fn attention_is_as_on_threads() {
    let (passed, said) = under_mpirun(3, "attention_of_a_rank");
    assert!(passed, "{said}");
    assert!(said.contains("the same bits"), "{said}");
}

#[test]
fn a_rank_that_panics_ends_all() {
    let (passed, said) = under_mpirun(3, "a_panic_of_rank_1");
    assert!(passed, "{said}");
    assert_eq!(said.matches("rank 1 panicked in `cast k v` (stage 1)").count(), 3, "{said}");
}

#[test]
#[ignore = "a process of every_collective_is_as_on_threads"]
fn collectives_of_a_rank() {
    let rendezvous = join(60);
    let _leaving = rendezvous.leaving_at_the_end();
    let machine = MpiMachine::new(rendezvous.clone(), 0, None).unwrap();
    let extent = if rendezvous.world_size() == 2 { Extent::Full } else { Extent::Quick };
    let checks = selftest_collectives(&machine, extent, Share::ALL, 8, |_, _| {}).unwrap();
    assert!(checks.iter().all(|check| check.passed && check.error == 0.0), "{checks:#?}");
    println!("{} collectives passed on rank {}", checks.len(), rendezvous.rank());
}

fn problem(ranks: usize) -> (Mask, AttentionSpec, Plan) {
    let all = Range::new(0, 384);
    let mask = Mask::new(384, 384, vec![AttnSlice::new(all, all, MaskType::Causal)]).unwrap();
    let spec = AttentionSpec {
        heads_q: 4,
        heads_kv: 2,
        head_dim: 16,
        head_dim_v: 16,
        dtype: DType::Bf16,
        scale: 0.25,
        softcap: 0.0,
        seqlen_sink: 0,
        gradient_shares: GradientShares::Accumulators,
        max_logits: false,
        dlse: false,
    };
    let config =
        PlanConfig { chunk_size: Some(32), stages: StageCount::Fixed(2).into(), ..PlanConfig::new(ranks) };
    let plan = plan_mask(&mask, &spec, &config).unwrap();
    (mask, spec, plan)
}

#[test]
#[ignore = "a process of attention_is_as_on_threads"]
fn attention_of_a_rank() {
    let rendezvous = join(60);
    let _leaving = rendezvous.leaving_at_the_end();
    let machine = MpiMachine::new(rendezvous.clone(), 0, None).unwrap();
    let (mask, spec, plan) = problem(rendezvous.world_size());
    let inputs = random_inputs(&mask, &spec, 5, Pass::ForwardBackward);
    let own = inputs.of_rank(&plan.ranks[rendezvous.rank()]).unwrap();
    let problem = RankProblem { plan: &plan, spec: &spec, pass: Pass::ForwardBackward, host_bytes: 0 };
    let config = RunConfig::default().with_limit(Duration::from_secs(60));
    let run = run_attention_ranks(&machine, &problem, &config, vec![own]).unwrap();
    let Some(run) = run.gather(&rendezvous, &plan).unwrap() else { return };
    assert_eq!(run.outputs, run_attention(&plan, &spec, &inputs, &config).unwrap().outputs);
    println!("the same bits");
}

#[test]
#[ignore = "a process of a_rank_that_panics_ends_all"]
fn a_panic_of_rank_1() {
    let rendezvous = join(60);
    let _leaving = rendezvous.leaving_at_the_end();
    let machine = MpiMachine::new(rendezvous.clone(), 0, None).unwrap();
    let (mask, spec, plan) = problem(rendezvous.world_size());
    let inputs = random_inputs(&mask, &spec, 5, Pass::Forward);
    let own = inputs.of_rank(&plan.ranks[rendezvous.rank()]).unwrap();
    let problem = RankProblem { plan: &plan, spec: &spec, pass: Pass::Forward, host_bytes: 0 };
    let at = FaultPoint::Label { label: "cast k v".to_owned(), stage: Some(1) };
    let faults = vec![FaultInjection { rank: 1, program: None, at, kind: FaultKind::Panic }];
    let config = RunConfig::default().with_limit(Duration::from_secs(30)).with_faults(faults);
    let began = Instant::now();
    let error = run_attention_ranks(&machine, &problem, &config, vec![own]).unwrap_err();
    assert!(matches!(error, ExecError::RankPanicked { rank: 1, .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20));
    println!("{error}");
}
