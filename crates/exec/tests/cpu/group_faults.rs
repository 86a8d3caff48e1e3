//! A rank that dies in a call, while others prepare, call and drop in an order of their own.

use std::time::{Duration, Instant};

use counterpoint_exec::{
    AttentionRank, Backend, CpuBackend, CpuMachine, CpuTransport, ExecError, FaultInjection, FaultKind,
    FaultPoint, Group, Machine, Pass, TcpLoopback, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_schedule::OverlapPolicy;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::group::{Case, Tensors, spec};

const RANKS: usize = 3;
/// Longer than the whole test may take: who waits for the dead rank until then has not heard of it.
const LIMIT: Duration = Duration::from_secs(60);

/// Far below the limit, and enough for a machine that is busy with other tests.
const NO_WAIT: Duration = Duration::from_secs(10);

/// Every rank hears which one died, soon, from whatever it does; and no drop waits.
#[test]
fn a_rank_that_dies_in_a_call_is_named_while_others_drop() {
    for seed in 0..4 {
        let victim = seed as usize % RANKS;
        // The first backward kills it: forwards of all ranks are under way then, some of them dropped.
        let fault = FaultInjection {
            rank: victim,
            program: Some("attention backward".into()),
            at: FaultPoint::Op(seed as usize % 4),
            kind: FaultKind::Panic,
        };
        let config = WorldConfig { limit: LIMIT, faults: vec![fault], ..WorldConfig::default() };
        dies(&CpuMachine::new(0, None).unwrap(), config.clone(), victim, seed);
        dies(&TcpLoopback::new(None), config, victim, seed);
    }
}

fn dies<M>(machine: &M, config: WorldConfig, victim: usize, seed: u64)
where
    M: Machine<Backend = CpuBackend, Transport = CpuTransport>,
{
    let case = Case::new(&Mask::causal(40).unwrap(), RANKS, spec(), seed);
    let tensors: Vec<Vec<Tensors>> = (0..4).map(|_| case.tensors()).collect();
    let group = Group::connect(machine, RANKS, config).unwrap();
    let began = Instant::now();
    let errors: Vec<ExecError> = std::thread::scope(|scope| {
        let (case, tensors) = (&case, &tensors);
        let of_rank = |rank: usize| {
            let rank = &group.ranks()[rank];
            scope.spawn(move || {
                let mut random = ChaCha8Rng::seed_from_u64(seed ^ rank.rank() as u64);
                let mut kept: Vec<AttentionRank<CpuBackend, CpuTransport>> = Vec::new();
                let mut step = |number: usize| -> Result<(), ExecError> {
                    let Case { plan, spec, .. } = case;
                    let policy = OverlapPolicy::default();
                    let calls =
                        AttentionRank::prepare(rank, plan, spec, Pass::ForwardBackward, policy, true)?;
                    let own = &tensors[number % tensors.len()][rank.rank()];
                    let forward = calls.forward(&own.forward(), None)?;
                    if number >= 6 {
                        calls.backward(&own.backward(), None)?.wait()?;
                    } else if random.random_bool(0.3) {
                        forward.wait()?;
                    }
                    kept.push(calls);
                    while kept.len() > random.random_range(0..4) {
                        let (gone, dropping) = (kept.swap_remove(0), Instant::now());
                        drop(gone);
                        let took = dropping.elapsed();
                        assert!(took < NO_WAIT, "seed {seed}: a drop took {took:?}");
                    }
                    rank.check()
                };
                (0..1000).find_map(|number| step(number).err())
            })
        };
        let threads: Vec<_> = (0..RANKS).map(of_rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().expect("a rank went on")).collect()
    });
    let took = began.elapsed();
    for error in &errors {
        let text = error.to_string();
        assert!(text.contains(&format!("rank {victim} panicked")), "seed {seed}: {text}");
    }
    assert!(took < LIMIT / 2, "seed {seed}: {took:?}");
    // What is left of it waits for nobody.
    assert_eq!(group.poll().unwrap_err().to_string(), errors[0].to_string());
    let dropping = Instant::now();
    let ranks: Vec<_> = group.ranks().to_vec();
    drop(group);
    assert!(ranks.iter().all(|rank| rank.backend().check().is_err()));
    drop(ranks);
    assert!(dropping.elapsed() < NO_WAIT, "seed {seed}: {:?}", dropping.elapsed());
}
