//! A model of groups: random sequences of prepare, call, drop, fail and rejoin, in another order on every rank, against what must come
//! of them.

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use counterpoint_exec::{
    AttentionRank, CpuBackend, CpuMachine, CpuTransport, ExecError, Group, Pass, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_plan::DType;
use counterpoint_schedule::OverlapPolicy;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::group::{Case, Tensors};
use crate::support;

const RANKS: usize = 3;

type Rank = AttentionRank<CpuBackend, CpuTransport>;

/// What all ranks do, in this order.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A forward and a backward of this case.
    Call(usize),
    /// This rank gives up instead of making the others' next call of the first case; all join anew.
    Fail(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..3usize).prop_map(Step::Call),
        1 => (0..RANKS).prop_map(Step::Fail),
    ];
    prop::collection::vec(step, 1..14)
}

fn cases() -> Vec<Case> {
    let spec = support::spec(2, 1, 4, 4, DType::F32);
    let masks = [Mask::causal(26), Mask::full(9), Mask::causal(2)];
    let case = |(seed, mask): (usize, Mask)| Case::new(&mask, RANKS, spec, seed as u64);
    masks.into_iter().map(Result::unwrap).enumerate().map(case).collect()
}

/// The groups that were joined, one after the other: whoever comes first joins for all ranks here.
#[derive(Default)]
struct Generations(Mutex<Vec<Group<CpuMachine>>>);

impl Generations {
    fn get(&self, generation: usize) -> Group<CpuMachine> {
        let mut groups = self.0.lock().unwrap();
        if groups.len() == generation {
            let limit = Duration::from_secs(60);
            groups.push(Group::local(RANKS, WorldConfig { limit, ..WorldConfig::default() }).unwrap());
        }
        groups[generation].clone()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_order_gives_right_results_or_the_first_error(steps in steps(), seed: u64) {
        let cases = cases();
        let (generations, together) = (Generations::default(), Barrier::new(RANKS));
        // Of each call the tensors of every rank.
        let calls: Vec<Vec<Tensors>> = steps.iter().map(|step| match step {
            Step::Call(case) => cases[*case].tensors(),
            Step::Fail(_) => cases[0].tensors(),
        }).collect();
        std::thread::scope(|scope| {
            for rank in 0..RANKS {
                let (cases, calls, steps, joined) = (&cases, &calls, &steps, (&generations, &together));
                scope.spawn(move || run_rank(rank, cases, calls, steps, joined, seed));
            }
        });
        for (step, tensors) in steps.iter().zip(&calls) {
            if let Step::Call(case) = step {
                cases[*case].check(tensors);
            }
        }
    }
}

/// One rank's random calls.
fn run_rank(
    rank: usize,
    cases: &[Case],
    calls: &[Vec<Tensors>],
    steps: &[Step],
    (generations, together): (&Generations, &Barrier),
    seed: u64,
) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (rank as u64 + 1));
    let mut generation = 0;
    let mut group = generations.get(0);
    let mut prepared: [Option<Rank>; 3] = [None, None, None];
    for (step, tensors) in steps.iter().zip(calls) {
        // Whenever it likes, a rank prepares what it may need and drops what it has.
        for (case, prepared) in cases.iter().zip(&mut prepared) {
            match rng.random_range(0..4) {
                0 => *prepared = None,
                1 => *prepared = Some(prepare(&group, rank, case).unwrap()),
                _ => {}
            }
        }
        let tensors = &tensors[rank];
        match *step {
            Step::Call(case) => {
                let attention =
                    prepared[case].get_or_insert_with(|| prepare(&group, rank, &cases[case]).unwrap());
                let forward = attention.forward(&tensors.forward(), None).unwrap();
                let backward = attention.backward(&tensors.backward(), None).unwrap();
                if rng.random() {
                    forward.wait().unwrap();
                }
                // Before a group goes, its calls are over: others may end it at the next step.
                backward.wait().unwrap();
            }
            Step::Fail(who) => {
                // Else one that is late would hear of it in a call before.
                together.wait();
                let wanted = ExecError::GaveUp { rank: who, reason: "seen".to_owned() };
                let error = if rank == who {
                    group.ranks()[rank].fail("seen")
                } else {
                    let attention = match prepared[0].take() {
                        Some(attention) => Ok(attention),
                        None => prepare(&group, rank, &cases[0]),
                    };
                    let called = attention.and_then(|rank| rank.forward(&tensors.forward(), None)?.wait());
                    called.unwrap_err()
                };
                assert_eq!(error, wanted);
                assert_eq!(group.poll(), Err(wanted.clone()));
                assert_eq!(group.ranks()[rank].check(), Err(wanted));
                generation += 1;
                group = generations.get(generation);
                prepared = [None, None, None];
            }
        }
    }
}

fn prepare(group: &Group<CpuMachine>, rank: usize, case: &Case) -> Result<Rank, ExecError> {
    let pass = Pass::ForwardBackward;
    AttentionRank::prepare(&group.ranks()[rank], &case.plan, &case.spec, pass, OverlapPolicy::default(), true)
}
