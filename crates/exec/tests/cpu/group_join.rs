//! Groups of ranks that join each for itself through a store, as processes do.

use std::collections::HashMap;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use counterpoint_exec::{
    Attempt, AttentionRank, ExecError, Group, JoinConfig, Pass, Rendezvous, RendezvousError, Store,
    WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_plan::DType;
use counterpoint_schedule::OverlapPolicy;

use crate::group::{Case, Tensors};
use crate::support;

const RANKS: usize = 3;

/// Somebody else's store.
#[derive(Default)]
struct Table(Mutex<HashMap<String, Vec<u8>>>);

impl Store for Table {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        self.0.lock().unwrap().insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    fn find(&self, key: &str) -> Result<Option<Vec<u8>>, ExecError> {
        Ok(self.0.lock().unwrap().get(key).cloned())
    }
}

fn config(limit: Duration) -> JoinConfig {
    JoinConfig { world: WorldConfig { limit, ..WorldConfig::default() }, ..JoinConfig::default() }
}

/// Each rank on a thread of its own; what they give, in their order.
fn on_ranks<R: Send>(run: impl Fn(usize) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                scope.spawn({
                    let run = &run;
                    move || run(rank)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn case() -> Case {
    Case::new(&Mask::causal(40).unwrap(), RANKS, support::spec(2, 1, 4, 4, DType::F32), 5)
}

fn call(
    group: &Group<counterpoint_exec::TcpMachine>,
    case: &Case,
    tensors: &Tensors,
) -> Result<(), ExecError> {
    let (pass, policy) = (Pass::ForwardBackward, OverlapPolicy::default());
    let attention = AttentionRank::prepare(&group.ranks()[0], &case.plan, &case.spec, pass, policy, true)?;
    drop(attention.forward(&tensors.forward(), None)?);
    let ticket = attention.backward(&tensors.backward(), None)?;
    // Gone while its calls are under way.
    drop(attention);
    ticket.wait()
}

#[test]
fn ranks_join_through_the_store_of_somebody_else_and_after_a_failure_anew() {
    let (case, store, config) = (case(), Table::default(), config(Duration::from_secs(30)));
    for failing in [None, Some(1), None] {
        let tensors = case.tensors();
        let ended = on_ranks(|rank| {
            // Who is quick may have given up before the others have joined.
            let group = Group::join(&store, rank, RANKS, &config)?;
            assert_eq!((group.ranks_here(), group.world_size()), (rank..rank + 1, RANKS));
            if failing == Some(rank) {
                return Err(group.fail("out of data"));
            }
            call(&group, &case, &tensors[rank])?;
            group.close()
        });
        match failing {
            None => {
                assert!(ended.iter().all(Result::is_ok), "{ended:?}");
                case.check(&tensors);
            }
            Some(rank) => {
                let given_up = ExecError::GaveUp { rank, reason: "out of data".to_owned() };
                assert!(ended.iter().all(|ended| *ended == Err(given_up.clone())), "{ended:?}");
            }
        }
    }
}

/// Our rendezvous is such a store too: groups come and go within one job.
#[test]
fn ranks_join_through_a_rendezvous() {
    let (case, table, config) = (case(), Table::default(), config(Duration::from_secs(30)));
    let tensors = case.tensors();
    on_ranks(|rank| {
        let job = Rendezvous::through(&table, rank, RANKS, &config).unwrap();
        for _ in 0..2 {
            let group = Group::join(&*job, rank, RANKS, &config).unwrap();
            call(&group, &case, &tensors[rank]).unwrap();
            group.close().unwrap();
        }
    });
    case.check(&tensors);
}

/// A rank that closes its group while others call it: both sides hear who left, long before the limit.
#[test]
fn a_rank_that_closes_while_others_call_is_named() {
    let (case, store) = (case(), Table::default());
    let config = config(Duration::from_secs(120));
    for leaver in 0..RANKS {
        let (before, after, all_called) = (case.tensors(), case.tensors(), Barrier::new(RANKS));
        let began = Instant::now();
        let ended = on_ranks(|rank| {
            let group = Group::join(&store, rank, RANKS, &config).unwrap();
            call(&group, &case, &before[rank]).unwrap();
            // The error ends the group, and with it what another rank still waits for.
            all_called.wait();
            if rank == leaver { group.close() } else { call(&group, &case, &after[rank]) }
        });
        case.check(&before);
        for error in ended.into_iter().map(Result::unwrap_err) {
            assert!(matches!(error, ExecError::Left { left, .. } if left == leaver), "{error}");
        }
        assert!(began.elapsed() < config.world.limit / 2, "{:?}", began.elapsed());
    }
}

/// A process that has left the job is named by those that wait for it where they join a group.
#[test]
fn a_rank_that_left_the_job_is_named_where_others_wait() {
    let (table, config) = (Table::default(), config(Duration::from_secs(120)));
    let began = Instant::now();
    let ended = on_ranks(|rank| {
        let job = Rendezvous::through(&table, rank, RANKS, &config).unwrap();
        if rank == 1 {
            return Ok(());
        }
        job.barrier("a barrier of all")
    });
    for error in [0, 2].map(|rank| ended[rank].clone().unwrap_err()) {
        assert!(matches!(error, ExecError::Left { left: 1, .. }), "{error}");
        assert!(error.to_string().contains("in `a barrier of all`"), "{error}");
    }
    assert!(began.elapsed() < config.world.limit / 2, "{:?}", began.elapsed());
}

/// A rank that goes without a word while others call.
#[test]
fn a_rank_that_goes_is_named_within_the_limit() {
    let (case, store) = (case(), Table::default());
    let config = config(Duration::from_secs(2));
    let tensors = case.tensors();
    let began = Instant::now();
    let ended = on_ranks(|rank| {
        let group = Group::join(&store, rank, RANKS, &config).unwrap();
        if rank == 2 { Ok(()) } else { call(&group, &case, &tensors[rank]) }
    });
    for error in ended.into_iter().take(2) {
        let text = error.unwrap_err().to_string();
        assert!(text.contains("rank 2"), "{text}");
    }
    assert!(began.elapsed() < Duration::from_secs(20));
}

const SHORT: Duration = Duration::from_millis(300);

/// Ranks whose earlier calls came to nothing, more often on one than on the others: the next one of each finds those of the others.
#[test]
fn ranks_that_tried_unequally_often_find_each_other() {
    let (case, long) = (case(), config(Duration::from_secs(60)));
    for early in 0..RANKS {
        let (store, tensors, tries) = (Table::default(), case.tensors(), Barrier::new(RANKS));
        on_ranks(|rank| {
            if rank == early {
                for _ in 0..2 {
                    let error = Group::join(&store, rank, RANKS, &config(SHORT)).map(drop).unwrap_err();
                    let named = matches!(&error, ExecError::Rendezvous(
                        RendezvousError::NotJoined { missing, .. } | RendezvousError::Absent { missing, .. }
                    ) if missing[..] == if early == 0 { vec![1, 2] } else { vec![0] });
                    assert!(named, "{error}");
                }
            }
            tries.wait();
            let began = Instant::now();
            // Of an attempt that failed a rank that was not in it hears once, if rank 0 has begun no other.
            let group = Group::join(&store, rank, RANKS, &long)
                .or_else(|_| Group::join(&store, rank, RANKS, &long))
                .unwrap();
            assert!(began.elapsed() < long.world.limit / 2, "{:?}", began.elapsed());
            call(&group, &case, &tensors[rank]).unwrap();
            group.close().unwrap();
        });
        case.check(&tensors);
    }
}

/// Who comes once the others have given up hears at once who waited for whom, and all join by their next calls.
#[test]
fn a_late_rank_hears_who_waited_for_whom() {
    let (store, long) = (Table::default(), config(Duration::from_secs(60)));
    let (given_up, heard) = (Barrier::new(RANKS), Barrier::new(RANKS));
    on_ranks(|rank| {
        let began = Instant::now();
        if rank == 2 {
            given_up.wait();
        }
        let limit = if rank == 2 { &long } else { &config(SHORT) };
        let error = Group::join(&store, rank, RANKS, limit).map(drop).unwrap_err();
        let waited_for_it = matches!(&error, ExecError::Rendezvous(
            RendezvousError::Absent { rank: 0 | 1, missing, .. }) if *missing == [2]);
        assert!(waited_for_it, "{error}");
        if rank != 2 {
            given_up.wait();
        }
        // Who comes once rank 0 tries again joins that.
        heard.wait();
        Group::join(&store, rank, RANKS, &long).unwrap().close().unwrap();
        assert!(began.elapsed() < long.world.limit / 2, "{:?}", began.elapsed());
    });
}

/// What a rank cannot do before it joins ends the others at once, wherever they wait: for places, for rank 0, or for the last rank.
#[test]
fn a_rank_that_fails_before_it_joins_ends_the_attempt_of_all() {
    let (store, long) = (Table::default(), config(Duration::from_secs(60)));
    let limit = long.world.limit;
    for failing in 0..RANKS {
        for exchanges in [false, true] {
            on_ranks(|rank| {
                let (began, reason) = (Instant::now(), "it has no profile".to_owned());
                let mut attempt = Attempt::begin(&store, rank, RANKS, limit).unwrap();
                let exchanged = exchanges.then(|| attempt.exchange(&store, &[rank as u8], limit).unwrap());
                assert!(exchanged.is_none_or(|all| all == [[0], [1], [2]]));
                if rank == failing {
                    std::thread::sleep(SHORT);
                    attempt.fail(&store, ExecError::GaveUp { rank, reason });
                    return;
                }
                let error = match exchanges {
                    true => attempt.join(&store, &long).map(drop).unwrap_err(),
                    false => attempt.exchange(&store, &[], limit).map(drop).unwrap_err(),
                };
                assert_eq!(error, ExecError::GaveUp { rank: failing, reason });
                assert!(began.elapsed() < limit / 2, "{:?}", began.elapsed());
            });
        }
    }
    on_ranks(|rank| Group::join(&store, rank, RANKS, &long).unwrap().close().unwrap());
}

/// Rank 0 goes without a word, as a killed thread does: the others follow it into its next attempt.
#[test]
fn ranks_follow_rank_0_into_a_newer_attempt() {
    let (store, limit) = (Table::default(), Duration::from_secs(60));
    on_ranks(|rank| {
        let mut attempt = Attempt::begin(&store, rank, RANKS, limit).unwrap();
        if rank == 0 {
            std::thread::sleep(SHORT);
            attempt = Attempt::begin(&store, rank, RANKS, limit).unwrap();
        }
        assert_eq!(attempt.exchange(&store, &[rank as u8], limit).unwrap(), [[0], [1], [2]]);
        attempt.join(&store, &config(limit)).unwrap();
    });
}
