//! Ranks that are threads, each with a rendezvous of its own, as processes have them.

mod lost;
mod results;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::message::{Hello, Welcome};
use super::*;
use crate::frame::read_frame;
use crate::network::{JobToken, KnockError, knock};
use crate::{ExecError, World, WorldConfig};

const LIMIT: Duration = Duration::from_secs(20);

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn launch(rank: usize, world_size: usize, ports: &[u16]) -> Launch {
    Launch {
        launcher: Launcher::Torchrun,
        rank,
        world_size,
        local_rank: None,
        point: RendezvousPoint { host: "localhost".to_owned(), ports: ports.to_vec(), job: "job".to_owned() },
        one_host: None,
        secret: None,
    }
}

fn join(
    rank: usize,
    world_size: usize,
    ports: &[u16],
    limit: Duration,
) -> Result<Arc<Rendezvous>, ExecError> {
    Rendezvous::join_launched(&launch(rank, world_size, ports), &[], limit)
}

fn seed(seed: u64) -> Vec<Facet> {
    vec![Facet::new("--seed", seed)]
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
            .map(|rank| scope.spawn(move || of_rank(join(rank, world_size, &ports, limit).unwrap())))
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
            assert_eq!(rank.get("id", None).unwrap(), b"from the last");
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
        let joining = |rank| scope.spawn(move || join(rank, 4, &ports, limit).map(drop));
        [joining(0), joining(2)].map(|thread| error_of(thread.join().unwrap().unwrap_err()))
    });
    for error in &errors {
        assert!(matches!(error, RendezvousError::Absent { missing, .. } if *missing == [1, 3]), "{error}");
        assert!(error.to_string().contains("for ranks 1 and 3, which never came"), "{error}");
    }
    // Nobody listens where rank 0 should be.
    let began = Instant::now();
    let error = error_of(join(1, 2, &[free_port()], limit).map(drop).unwrap_err());
    assert!(matches!(error, RendezvousError::Unreachable { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("refused") && began.elapsed() < Duration::from_secs(5), "{error}");
}

#[test]
fn what_nobody_sets_is_named_and_ends_the_job() {
    let errors = ranks(2, Duration::from_millis(500), |rank| match rank.rank() {
        0 => rank.get("an id", Some(1)).map(drop).unwrap_err(),
        _ => {
            thread::sleep(Duration::from_millis(1000));
            rank.barrier("end").unwrap_err()
        }
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].to_string().contains("for `an id`, which rank 1 has not set"), "{}", errors[0]);
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
            scope.spawn(move || join(rank, 2, &ports, LIMIT).unwrap().barrier("end").unwrap());
        }
    });
}

/// What a foreign launcher does: rank 0 listens wherever it likes, and the others are given the address and the token.
#[test]
fn ranks_join_a_store_that_is_hosted_for_them() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let token = JobToken::random().unwrap();
    let host = Rendezvous::host(listener, 3, &token, LIMIT).unwrap();
    assert_eq!(host.port(), port);
    let copied = JobToken::from_bytes(token.to_bytes());
    thread::scope(|scope| {
        let use_it = |rank: Arc<Rendezvous>| rank.all_gather("ranks", &[rank.rank() as u8]).unwrap();
        let others: Vec<_> = (1..3)
            .map(|rank| {
                let copied = &copied;
                scope.spawn(move || use_it(Rendezvous::join(loopback(port), rank, 3, copied, LIMIT).unwrap()))
            })
            .collect();
        assert_eq!(use_it(host.join(Ipv4Addr::LOCALHOST.into(), LIMIT).unwrap()), [[0], [1], [2]]);
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), [[0], [1], [2]]));
    });
}

/// A drop waits for nobody, and the store answers those who are still there; a process that ends next waits for them.
#[test]
fn rank_0_goes_at_once_and_its_store_when_all_have_left() {
    const LATER: Duration = Duration::from_millis(600);
    for leaves in [false, true] {
        let took = ranks(2, LIMIT, |rank| {
            rank.barrier("both are here").unwrap();
            if rank.rank() == 1 {
                thread::sleep(LATER);
                rank.set("late", b"value").unwrap();
                assert_eq!(rank.get("late", None).unwrap(), b"value");
                return None;
            }
            let began = Instant::now();
            if leaves {
                rank.leave();
            }
            drop(rank);
            Some(began.elapsed())
        });
        let took = took[0].unwrap();
        assert_eq!(took >= LATER / 2, leaves, "{took:?}");
        assert!(took < LATER + Duration::from_secs(4), "{took:?}");
    }
}

/// A store with a random token, and ranks 0 and 1 of two once `strange` is through.
fn among_strangers(strange: impl FnOnce(SocketAddr, &JobToken)) {
    let token = JobToken::random().unwrap();
    let host = Rendezvous::host(TcpListener::bind("127.0.0.1:0").unwrap(), 2, &token, LIMIT).unwrap();
    let address = loopback(host.port());
    strange(address, &token);
    let began = Instant::now();
    thread::scope(|scope| {
        let other = scope.spawn(|| Rendezvous::join(address, 1, 2, &token, LIMIT).unwrap().barrier("end"));
        host.join(address.ip(), LIMIT).unwrap().barrier("end").unwrap();
        other.join().unwrap().unwrap();
    });
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn strangers_neither_get_in_nor_keep_others_out() {
    among_strangers(|address, token| {
        let mut random = vec![0; 64 << 10];
        getrandom::fill(&mut random).unwrap();
        for bytes in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), b"cntrpnt\n", &random, &[0; 4096], &[255; 12]] {
            TcpStream::connect(address).unwrap().write_all(bytes).ok();
        }
        let hello = Hello { rank: 1, facets: admission::with_size(2, Vec::new()) };
        let hello = serde_json::to_vec(&hello).unwrap();
        let other = JobToken::random().unwrap();
        let refused = knock(address, &other, &hello, Instant::now() + LIMIT).unwrap_err();
        assert!(matches!(refused, KnockError::AnotherToken), "{refused}");
        // Right up to the proof, which is of no value a second time.
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&[b"cntrpnt\n".as_slice(), &2u32.to_le_bytes(), &[7; 32]].concat()).unwrap();
        let mut answer = [0; 76];
        stream.read_exact(&mut answer).unwrap();
        stream.write_all(&[&answer[44..], &[0; 4]].concat()).unwrap();
        assert_eq!(stream.read(&mut answer).unwrap_or(0), 0, "it is closed without a word");
        // One that has the token and makes no sense.
        knock(address, token, b"{}", Instant::now() + LIMIT).unwrap();
    });
}

#[test]
fn slow_strangers_keep_nobody_out() {
    let mut slow = Vec::new();
    among_strangers(|address, _| {
        for _ in 0..400 {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"cntr").unwrap();
            slow.push(stream);
        }
    });
    // All but a bounded number have been closed meanwhile.
    let is_closed = |mut stream: &TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        !matches!(stream.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    };
    assert!(slow.iter().filter(|stream| is_closed(stream)).count() >= 100);
}

#[test]
fn a_second_process_of_a_rank_is_turned_away_and_the_job_goes_on() {
    let token = JobToken::random().unwrap();
    let host = Rendezvous::host(TcpListener::bind("127.0.0.1:0").unwrap(), 2, &token, LIMIT).unwrap();
    let address = loopback(host.port());
    thread::scope(|scope| {
        let other = scope.spawn(|| Rendezvous::join(address, 1, 2, &token, LIMIT).unwrap());
        let first = host.join(address.ip(), LIMIT).unwrap();
        let other = other.join().unwrap();
        for rank in [0, 1] {
            let error = error_of(Rendezvous::join(address, rank, 2, &token, LIMIT).map(drop).unwrap_err());
            let words =
                format!("rank {rank} found another job at {address}: its rank {rank} is there already");
            assert!(error.to_string().contains(&words), "{error}");
        }
        let end = scope.spawn(move || other.barrier("end"));
        first.barrier("end").unwrap();
        end.join().unwrap().unwrap();
    });
}

#[test]
fn ranks_that_were_started_with_other_things_are_named_soon() {
    let ports = [free_port()];
    let began = Instant::now();
    let errors = thread::scope(|scope| {
        let joining = |rank: usize, world_size, facets: Vec<Facet>| {
            scope.spawn(move || {
                let launch = launch(rank, world_size, &ports);
                error_of(Rendezvous::join_launched(&launch, &facets, LIMIT).map(drop).unwrap_err())
            })
        };
        [joining(0, 3, seed(0)), joining(1, 3, seed(7)), joining(2, 4, seed(0))]
            .map(|thread| thread.join().unwrap())
    });
    for error in errors {
        let words = "--seed is 0 on ranks 0 and 2 and 7 on rank 1";
        assert!(error.to_string().contains(words), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// Whoever comes first: a second job at the same place never gets a rank of the first, nor gives it one.
#[test]
fn two_jobs_at_one_place_never_swap_ranks() {
    for round in 0..3u64 {
        let ports = [free_port()];
        let ended = AtomicUsize::new(0);
        let results = thread::scope(|scope| {
            let ended = &ended;
            let joining = |job: u64, rank: usize| {
                scope.spawn(move || {
                    // In any order.
                    thread::sleep(Duration::from_millis((job * 7 + rank as u64 * 11 + round * 5) % 23));
                    let joined = Rendezvous::join_launched(&launch(rank, 2, &ports), &seed(job), LIMIT);
                    let joined = joined.inspect_err(|_| {
                        ended.fetch_add(1, Ordering::Relaxed);
                    })?;
                    let jobs = joined.all_gather("jobs", &[job as u8])?;
                    assert_eq!(jobs, [[job as u8], [job as u8]]);
                    // It is there for as long as the other.
                    let began = Instant::now();
                    while ended.load(Ordering::Relaxed) < 2 && began.elapsed() < LIMIT / 2 {
                        thread::sleep(Duration::from_millis(5));
                    }
                    joined.barrier("end")
                })
            };
            [joining(0, 0), joining(0, 1), joining(1, 0), joining(1, 1)].map(|thread| thread.join().unwrap())
        });
        let ended: Vec<String> =
            results.iter().filter_map(|result| result.as_ref().err().map(ToString::to_string)).collect();
        assert_eq!(ended.len(), 2, "one job goes on: {ended:?}");
        assert_eq!(results[0].is_ok(), results[1].is_ok(), "{ended:?}");
        assert!(ended.iter().all(|error| error.contains("found another job at")), "{ended:?}");
    }
}

#[test]
fn ranks_with_a_secret_know_each_other_and_no_others() {
    let ports = [free_port(), free_port()];
    thread::scope(|scope| {
        for (job, rank) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            scope.spawn(move || {
                let secret = format!("secret of job {job}, which is long");
                let variables = |name: &str| match name {
                    "RANK" => Some(rank.to_string()),
                    "WORLD_SIZE" => Some("2".to_owned()),
                    RENDEZVOUS_VARIABLE => Some("localhost:1".to_owned()),
                    JOB_SECRET_VARIABLE => Some(secret.clone()),
                    _ => None,
                };
                let mut launch = Launch::from_variables(variables).unwrap().unwrap();
                launch.point.ports = ports.to_vec();
                let joined = Rendezvous::join_launched(&launch, &[], LIMIT).unwrap();
                assert_eq!(joined.all_gather("jobs", &[job]).unwrap(), [[job], [job]]);
            });
        }
    });
}

#[test]
fn ranks_on_several_hosts_need_a_secret() {
    let mut far = launch(1, 2, &[29_501]);
    // Set aside for documents: no host has it.
    far.point.host = "203.0.113.7".to_owned();
    let mut several = launch(0, 2, &[29_501]);
    several.one_host = Some(false);
    for launch in [far, several] {
        let error = error_of(Rendezvous::join_launched(&launch, &[], LIMIT).map(drop).unwrap_err());
        assert!(error.to_string().contains("COUNTERPOINT_JOB_SECRET is not set, and"), "{error}");
    }
}

/// The value is larger than what buffers hold, and the rank that asked for it reads nothing: the others go on, and at the limit
/// hear which it is.
#[test]
fn a_rank_that_takes_nothing_holds_up_no_other_and_is_named_at_the_limit() {
    // More than buffers hold, and little enough that it comes within the limit on a busy machine.
    const BYTES: usize = 24 << 20;
    let limit = Duration::from_secs(6);
    let token = JobToken::random().unwrap();
    let host = Rendezvous::host(TcpListener::bind("127.0.0.1:0").unwrap(), 3, &token, limit).unwrap();
    let address = loopback(host.port());
    let began = thread::scope(|scope| {
        let stopped = scope.spawn(|| {
            let hello = Hello { rank: 2, facets: admission::with_size(3, Vec::new()) };
            let hello = serde_json::to_vec(&hello).unwrap();
            let mut stream = knock(address, &token, &hello, Instant::now() + LIMIT).unwrap();
            let welcome = read_frame::<Welcome>(&mut stream).unwrap().unwrap().0;
            assert!(matches!(welcome, Welcome::Joined { .. }));
            let roster = br#"{"host":"h","address":"127.0.0.1"}"#;
            let start = message::Request::Gather { id: 0, place: "start".to_owned() };
            crate::frame::write_frame(&mut stream, &start, &[roster]).unwrap();
            let get = message::Request::Get { id: 1, key: "large".to_owned(), keep: message::Keep::Yes };
            crate::frame::write_frame(&mut stream, &get, &[]).unwrap();
            stream
        });
        let other = scope.spawn(|| {
            let joined = Rendezvous::join(address, 1, 3, &token, limit).unwrap();
            assert_eq!(joined.get("large", Some(0)).unwrap().len(), BYTES);
            joined.add("seen", 1).unwrap();
            joined.barrier("after").unwrap_err()
        });
        let first = host.join(address.ip(), limit).unwrap();
        let _open = stopped.join().unwrap();
        let began = Instant::now();
        first.set("large", &vec![1; BYTES]).unwrap();
        let errors = [first.barrier("after").unwrap_err(), other.join().unwrap()];
        for error in errors {
            let text = error.to_string();
            assert!(
                text.contains("for rank 2, which never came") || text.contains("rank 2 took nothing"),
                "{text}"
            );
        }
        began
    });
    assert!(began.elapsed() < limit + Duration::from_secs(6), "{:?}", began.elapsed());
}
