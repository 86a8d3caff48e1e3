//! Groups of ranks that join each for itself through a store, as processes do.

use std::collections::HashMap;
use std::sync::{Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

use counterpoint_exec::{
    AttentionRank, ExecError, Group, JoinConfig, Pass, Rendezvous, RendezvousError, Store, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_plan::DType;
use counterpoint_schedule::OverlapPolicy;

use crate::group::{Case, Tensors};
use crate::support;

const RANKS: usize = 3;

/// Somebody else's store.
#[derive(Default)]
struct Table {
    values: Mutex<Values>,
    changed: Condvar,
}

#[derive(Default)]
struct Values {
    set: HashMap<String, Vec<u8>>,
    counters: HashMap<String, i64>,
}

impl Store for Table {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        self.values.lock().unwrap().set.insert(key.to_owned(), value.to_owned());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, ExecError> {
        Ok(self.values.lock().unwrap().set[key].clone())
    }

    fn add(&self, key: &str, by: i64) -> Result<i64, ExecError> {
        let mut values = self.values.lock().unwrap();
        let count = values.counters.entry(key.to_owned()).or_default();
        *count += by;
        Ok(*count)
    }

    fn wait(&self, key: &str, limit: Duration) -> Result<(), ExecError> {
        let values = self.values.lock().unwrap();
        let (_values, waited) =
            self.changed.wait_timeout_while(values, limit, |values| !values.set.contains_key(key)).unwrap();
        let unset = RendezvousError::Unset { rank: 0, key: key.to_owned(), setter: None, waited: limit };
        if waited.timed_out() { Err(unset.into()) } else { Ok(()) }
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
