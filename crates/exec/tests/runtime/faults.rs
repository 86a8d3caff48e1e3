//! Ranks that panic, stall, or never come: every call ends within the limit and names the one to blame.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::{
    Communicator, ExecError, FaultInjection, FaultKind, FaultPoint, Prepared, World, WorldConfig,
};
use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{BufferRole, Op, Program};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::collectives::buffer;
use crate::programs::{Draft, prepare};

// Long against a busy machine's pauses: a rank that only waits for a core must not be blamed.
const LIMIT: Duration = Duration::from_millis(1200);

/// Every rank gathers everyone's row, three times, and copies what it got.
pub(crate) fn gather_program(rank: usize, world_size: usize) -> Program {
    let mut draft = Draft::new(rank, world_size);
    let own = draft.buffer("own", 1, BufferRole::Input);
    let part = GroupPart::all_gather_v(rank, &vec![1; world_size]);
    for stage in 0..3 {
        let all = draft.buffer(&format!("all {stage}"), world_size, BufferRole::Scratch);
        let copy = draft.buffer(&format!("copy {stage}"), world_size, BufferRole::Output);
        draft.cast(stage, &part, (own, all), None);
        let arrived = draft.p.mark(draft.communication, Some(stage), "arrived");
        draft.p.after(draft.compute, Some(stage), "wait", arrived);
        draft.compute(Some(stage), "copy", Op::Cast { src: all, dst: copy });
        let copied = draft.p.mark(draft.compute, Some(stage), "copied");
        draft.p.after(draft.communication, Some(stage), "wait for copy", copied);
    }
    draft.p.finish()
}

/// Runs under a fault; gives the error and how long the call took.
fn run_with(world_size: usize, limit: Duration, fault: FaultInjection) -> (Result<(), ExecError>, Duration) {
    let config = WorldConfig { limit, faults: vec![fault], ..WorldConfig::default() };
    let mut ranks =
        prepare((0..world_size).map(|rank| gather_program(rank, world_size)).collect(), config).unwrap();
    for (rank, prepared) in ranks.iter_mut().enumerate() {
        prepared.bind("own", buffer(&[1, 1], DType::F64, &[rank as f64])).unwrap();
    }
    let began = Instant::now();
    let result = Prepared::run_ranks(&mut ranks).map(drop);
    let elapsed = began.elapsed();
    if let Err(first) = &result {
        // What failed stays failed, with the same words on every rank.
        for rank in &mut ranks {
            assert_eq!(rank.run(&[]).map(drop).unwrap_err(), *first);
        }
    }
    (result, elapsed)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_panic_anywhere_ends_the_run_at_once(world_size in 1usize..5, rank in 0usize..5, op in 0usize..18) {
        let rank = rank % world_size;
        let kind = FaultKind::Panic;
        let fault = FaultInjection { rank, program: None, at: FaultPoint::Op(op), kind };
        let (result, elapsed) = run_with(world_size, Duration::from_secs(30), fault);
        match result {
            Err(ExecError::RankPanicked { rank: panicked, message, .. }) => {
                prop_assert_eq!(panicked, rank);
                prop_assert_eq!(message, "injected panic");
            }
            other => prop_assert!(false, "{:?}", other),
        }
        prop_assert!(elapsed < Duration::from_secs(10), "{:?}", elapsed);
    }
}

/// Each waits until the limit is over, so they wait together.
#[test]
fn a_stall_anywhere_ends_within_the_limit_and_is_blamed() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let cases: Vec<_> = (0..12)
        .map(|_| {
            let world_size = rng.random_range(1..5);
            (world_size, rng.random_range(0..world_size), rng.random_range(0..18))
        })
        .collect();
    for cases in cases.chunks(4) {
        thread::scope(|scope| {
            for &(world_size, rank, op) in cases {
                scope.spawn(move || a_stall_is_blamed(world_size, rank, op));
            }
        });
    }
}

fn a_stall_is_blamed(world_size: usize, rank: usize, op: usize) {
    let kind = FaultKind::Stall(Duration::from_secs(10));
    let fault = FaultInjection { rank, program: None, at: FaultPoint::Op(op), kind };
    let (result, elapsed) = run_with(world_size, LIMIT, fault);
    let place = format!("operation {op} of rank {rank} of {world_size}");
    let Err(ExecError::Stalled(stall)) = result else { panic!("{place}: {result:?}") };
    assert_eq!(stall.culprit, rank, "{place}: {stall}");
    assert!(stall.culprit_doing.contains("has been in"), "{place}: {stall}");
    assert!(elapsed < Duration::from_secs(8), "{place}: {elapsed:?}");
}

#[test]
fn a_delay_below_the_limit_is_no_fault() {
    let at = FaultPoint::Label { label: "copy".to_owned(), stage: Some(1) };
    let kind = FaultKind::Stall(Duration::from_millis(100));
    let fault = FaultInjection { rank: 1, program: Some("draft".into()), at, kind };
    let (result, elapsed) = run_with(3, Duration::from_secs(20), fault);
    assert_eq!(result, Ok(()));
    assert!(elapsed >= Duration::from_millis(100));
}

#[test]
fn a_rank_that_never_comes_is_named_with_what_it_did_last() {
    let config = WorldConfig { limit: LIMIT, ..WorldConfig::default() };
    let ranks = Communicator::local(&World::new(3, config), None).unwrap();
    let lengths = [1, 1, 1];
    let from: Vec<_> = (0..3).map(|_| buffer(&[1], DType::F32, &[1.0])).collect();
    let to: Vec<_> = (0..3).map(|_| buffer(&[3], DType::F32, &[0.0; 3])).collect();
    let cast = |rank: usize, label: &str| {
        let part = GroupPart::all_gather_v(rank, &lengths);
        ranks[rank].group_cast(label, &part, &[(&from[rank], &to[rank])], DType::F32).unwrap()
    };
    let handles: Vec<_> = (0..3).map(|rank| cast(rank, "cast k v")).collect();
    handles.into_iter().for_each(|handle| handle.synchronize().unwrap());
    // The second time rank 1 stays away.
    let handles = [cast(0, "cast again"), cast(2, "cast again")];
    let errors: Vec<_> = handles.into_iter().map(|handle| handle.synchronize().unwrap_err()).collect();
    assert_eq!(errors[0], errors[1]);
    let ExecError::Stalled(stall) = &errors[0] else { panic!("{}", errors[0]) };
    assert_eq!((stall.awaited.as_str(), stall.culprit), ("rank 1", 1));
    let text = stall.to_string();
    assert!(text.contains("collective 1 `cast again`"), "{text}");
    assert!(text.contains("rank 1 last finished collective 0 `cast k v`"), "{text}");
}
