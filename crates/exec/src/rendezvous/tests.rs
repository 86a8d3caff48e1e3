//! Ranks that are threads, each with a rendezvous of its own, as processes have them.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::message::{Hello, PROTOCOL, Welcome};
use super::*;
use crate::frame::{FrameLimits, read_frame, write_frame};
use crate::{ExecError, World, WorldConfig};

const LIMIT: Duration = Duration::from_secs(20);

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn launch(rank: usize, world_size: usize, ports: &[u16]) -> Launch {
    Launch {
        launcher: Launcher::Torchrun,
        rank,
        world_size,
        local_rank: None,
        meeting: MeetingPoint { host: "localhost".to_owned(), ports: ports.to_vec(), job: "job".to_owned() },
    }
}

/// What each of `world_size` ranks gives.
fn ranks<T: Send>(
    world_size: usize,
    limit: Duration,
    of_rank: impl Fn(Arc<Rendezvous>) -> T + Sync,
) -> Vec<T> {
    let ports = [free_port()];
    thread::scope(|scope| {
        let of_rank = &of_rank;
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                scope.spawn(move || {
                    of_rank(Rendezvous::join(&launch(rank, world_size, &ports), limit).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn error_of(error: ExecError) -> RendezvousError {
    match error {
        ExecError::Rendezvous(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn bytes_go_around() {
    for world_size in [1, 2, 5] {
        ranks(world_size, LIMIT, |rank| {
            let own = vec![rank.rank() as u8; rank.rank()];
            for _ in 0..3 {
                let all = rank.all_gather("parts", &own).unwrap();
                let expected: Vec<Vec<u8>> = (0..world_size).map(|rank| vec![rank as u8; rank]).collect();
                assert_eq!(all, expected);
            }
            if rank.rank() == world_size - 1 {
                rank.set("id", b"from the last").unwrap();
            }
            assert_eq!(rank.get("id").unwrap(), b"from the last");
            rank.barrier("all have it").unwrap();
            rank.add("sum", rank.rank() as i64 + 1).unwrap();
            rank.barrier("added").unwrap();
            assert_eq!(rank.add("sum", 0).unwrap() as usize, world_size * (world_size + 1) / 2);
            assert_eq!(rank.ranks_on_this_host(), (0..world_size).collect::<Vec<_>>());
            assert!(rank.address_of(world_size - 1).is_loopback());
        });
    }
}

/// Nobody starts before the last one has come, whoever that is, and all have one hold.
#[test]
fn ranks_start_together() {
    const RUNS: usize = 6;
    let starts = ranks(3, LIMIT, |rank| {
        let run = |run: usize| {
            if run % 3 == rank.rank() {
                thread::sleep(Duration::from_millis(5));
            }
            let came = Instant::now();
            let wish = Duration::from_micros(100 * (1 + (run + rank.rank()) as u64 % 3));
            let start = rank.start_together("a run", wish).unwrap();
            assert!(Instant::now() >= start.at);
            (came, start)
        };
        (0..RUNS).map(run).collect::<Vec<_>>()
    });
    for run in 0..RUNS {
        let of_run = || starts.iter().map(|rank| rank[run]);
        let last = of_run().map(|(came, _)| came).max().unwrap();
        assert!(of_run().all(|(_, start)| start.at >= last));
        assert!(of_run().all(|(_, start)| start.hold == Duration::from_micros(300)));
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let ports = [free_port()];
    let limit = Duration::from_millis(500);
    let errors = thread::scope(|scope| {
        let join = |rank| scope.spawn(move || Rendezvous::join(&launch(rank, 4, &ports), limit).map(drop));
        [join(0), join(2)].map(|thread| error_of(thread.join().unwrap().unwrap_err()))
    });
    for error in &errors {
        assert!(matches!(error, RendezvousError::Absent { missing, .. } if *missing == [1, 3]), "{error}");
        assert!(error.to_string().contains("for ranks 1 and 3, which never came"), "{error}");
    }
    // Nobody listens where rank 0 should be.
    let began = Instant::now();
    let error = error_of(Rendezvous::join(&launch(1, 2, &[free_port()]), limit).map(drop).unwrap_err());
    assert!(matches!(error, RendezvousError::Unreachable { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("refused") && began.elapsed() < Duration::from_secs(5), "{error}");
}

#[test]
fn what_nobody_sets_is_named_and_ends_the_job() {
    let errors = ranks(2, Duration::from_millis(500), |rank| match rank.rank() {
        0 => rank.get("an id").map(drop).unwrap_err(),
        _ => {
            thread::sleep(Duration::from_millis(1000));
            rank.barrier("end").unwrap_err()
        }
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].to_string().contains("for `an id`, which no rank has set"), "{}", errors[0]);
}

#[test]
fn the_first_error_is_everybodys() {
    let began = Instant::now();
    let errors = ranks(3, LIMIT, |rank| {
        let world = World::new(3, WorldConfig::default());
        rank.attach(&world).unwrap();
        rank.barrier("attached").unwrap();
        let own = ExecError::OutOfMemory { rank: None, needed: 7, available: rank.rank() as u64 };
        match rank.rank() {
            1 => world.fail(own),
            _ => {
                let error = rank.barrier("never").unwrap_err();
                assert_eq!(rank.fail(own), error);
                // The world hears of it by a thread of its own.
                while world.failure().is_none() && began.elapsed() < LIMIT {
                    thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(world.failure(), Some(error.clone()));
                error
            }
        }
    });
    // Its own words on the rank itself; elsewhere with the rank.
    assert_eq!(errors[1], ExecError::OutOfMemory { rank: None, needed: 7, available: 1 });
    for error in [&errors[0], &errors[2]] {
        assert_eq!(error.to_string(), format!("rank 1 failed: {}", errors[1]));
    }
    assert!(began.elapsed() < LIMIT);
}

#[test]
fn ranks_that_disagree_are_named() {
    let errors = ranks(3, LIMIT, |rank| {
        let mask = if rank.rank() == 1 { "causal:8k" } else { "causal:4k" };
        rank.agree("arguments", &[Facet::new("version", "1"), Facet::new("--mask", mask)]).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("--mask is causal:4k on ranks 0 and 2 and causal:8k on rank 1"), "{text}");
    }
}

#[test]
fn a_taken_port_is_passed_over() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    // It lets connections in and closes them, as a service of another kind would.
    let taken = other.local_addr().unwrap().port();
    thread::spawn(move || other.incoming().for_each(drop));
    let ports = [taken, free_port()];
    thread::scope(|scope| {
        for rank in 0..2 {
            let join =
                move || Rendezvous::join(&launch(rank, 2, &ports), LIMIT).unwrap().barrier("end").unwrap();
            scope.spawn(join);
        }
    });
}

#[test]
fn a_second_process_of_one_rank_and_another_size_end_the_job() {
    for (rank, world_size, words) in [(0, 2, "there is a rank 0 already"), (1, 3, "it is one of 3 ranks")] {
        let ports = [free_port()];
        let errors = thread::scope(|scope| {
            let host = scope.spawn(move || Rendezvous::join(&launch(0, 2, &ports), LIMIT).map(drop));
            let stray = scope.spawn(move || {
                // As rank 1 would, which does not listen itself.
                let meeting = launch(0, 1, &ports).meeting;
                let mut stream = loop {
                    match TcpStream::connect(("127.0.0.1", meeting.ports[0])) {
                        Ok(stream) => break stream,
                        Err(_) => thread::sleep(Duration::from_millis(5)),
                    }
                };
                // The host itself must be in before another may take its name.
                thread::sleep(Duration::from_millis(300));
                let hello = Hello { protocol: PROTOCOL, job: meeting.job, rank, world_size };
                write_frame(&mut stream, &hello, &[]).unwrap();
                let answer = read_frame::<Welcome>(&mut stream, FrameLimits::STRANGER).unwrap().unwrap().0;
                let Welcome::Refused { reason } = answer else { panic!("{answer:?}") };
                reason
            });
            (host.join().unwrap().unwrap_err(), stray.join().unwrap())
        });
        assert!(errors.1.contains(words), "{}", errors.1);
        assert!(errors.0.to_string().contains(words), "{}", errors.0);
    }
}

#[test]
fn a_rank_whose_connection_breaks_is_lost_to_all() {
    let ports = [free_port()];
    thread::scope(|scope| {
        let others: Vec<_> = [0, 2]
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let joined = Rendezvous::join(&launch(rank, 3, &ports), LIMIT)?;
                    joined.barrier("the end")
                })
            })
            .collect();
        let dying = scope.spawn(move || {
            let joined = Rendezvous::join(&launch(1, 3, &ports), LIMIT).unwrap();
            joined.break_connection();
        });
        dying.join().unwrap();
        for other in others {
            let error = error_of(other.join().unwrap().unwrap_err());
            assert!(matches!(error, RendezvousError::Lost { lost: 1, .. }), "{error}");
        }
    });
}

#[test]
fn a_world_of_other_ranks_is_refused() {
    let errors = ranks(2, LIMIT, |rank| {
        let error = rank.attach(&World::new(3, WorldConfig::default())).unwrap_err();
        rank.barrier("end").unwrap();
        error
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(matches!(error, ExecError::BadCollective { rank: of, .. } if *of == rank), "{error}");
        assert!(error.to_string().contains("3 ranks and 2 have met"), "{error}");
    }
}
