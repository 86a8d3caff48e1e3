//! Ranks among strangers, other jobs, and ranks that stop or were started with something else.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;

use crate::support::{Folder, qkv, safetensors};

/// Longer than anything here takes, shorter than the limits that must not be reached.
const SOON: Duration = Duration::from_secs(40);
const SEED: u64 = 19;

/// The rendezvous of a job, and what its ranks are given besides torchrun's variables.
#[derive(Clone)]
struct Place {
    host: String,
    /// The port after it is the first where rank 0 listens.
    port: u16,
    secret: Option<&'static str>,
}

impl Place {
    fn new() -> Self {
        Self { host: "127.0.0.1".to_owned(), port: free_port() - 1, secret: None }
    }

    fn rank(&self, folder: &Folder, line: &str, rank: usize, world_size: usize) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_counterpoint"));
        command.args(line.split_whitespace());
        self.launched(&mut command, folder, rank, world_size);
        command
    }

    fn launched(&self, command: &mut Command, folder: &Folder, rank: usize, world_size: usize) {
        command
            .current_dir(folder.path("."))
            .env_remove("RUST_BACKTRACE")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", &self.host)
            .env("MASTER_PORT", self.port.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        match self.secret {
            Some(secret) => command.env("COUNTERPOINT_JOB_SECRET", secret),
            None => command.env_remove("COUNTERPOINT_JOB_SECRET"),
        };
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Processes, killed when this goes.
struct Ranks {
    processes: Vec<Child>,
    began: Instant,
}

struct ProcessEnd {
    status: Option<i32>,
    stderr: String,
}

impl Ranks {
    fn start(commands: impl IntoIterator<Item = Command>) -> Self {
        let began = Instant::now();
        let start = |mut command: Command| command.spawn().unwrap();
        Self { processes: commands.into_iter().map(start).collect(), began }
    }

    fn signal(&self, rank: usize, signal: &str) {
        let id = self.processes[rank].id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Waits until a process has a thread whose name holds `name`.
    fn wait_for_thread(&self, rank: usize, name: &str) {
        let tasks = format!("/proc/{}/task", self.processes[rank].id());
        let has = || {
            let tasks = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
            let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
            names.into_iter().any(|found| found.contains(name))
        };
        while !has() {
            assert!(self.began.elapsed() < SOON, "rank {rank} has no thread `{name}`");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for these, which must end within `limit` of the start.
    fn end_of(&mut self, ranks: &[usize], limit: Duration) -> Vec<ProcessEnd> {
        let end = |&rank: &usize| {
            let process = &mut self.processes[rank];
            let status = loop {
                if let Some(status) = process.try_wait().unwrap() {
                    break status;
                }
                assert!(self.began.elapsed() < limit, "rank {rank} still runs after {limit:?}");
                thread::sleep(Duration::from_millis(5));
            };
            let mut stderr = String::new();
            process.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
            ProcessEnd { status: status.code(), stderr }
        };
        ranks.iter().map(end).collect()
    }

    fn end(mut self, limit: Duration) -> Vec<ProcessEnd> {
        self.end_of(&(0..self.processes.len()).collect::<Vec<_>>(), limit)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for process in &mut self.processes {
            process.kill().ok();
            process.wait().ok();
        }
    }
}

impl ProcessEnd {
    fn is_well(&self) {
        assert!(
            self.status == Some(0) && !self.stderr.contains("error"),
            "{:?}: {}",
            self.status,
            self.stderr
        );
    }

    fn says(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, Some(status), "{}", self.stderr);
        let mut lines = self.stderr.lines().filter(|line| !line.starts_with("note: "));
        assert!(lines.next().is_some_and(|line| line.starts_with("error: ")), "{}", self.stderr);
        assert_eq!(lines.next(), None, "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "no `{word}` in {}", self.stderr);
        }
        for wrong in ["Some(", "Fixed(", "None", "Error {"] {
            assert!(!self.stderr.contains(wrong), "{}", self.stderr);
        }
    }
}

const LINE: &str = "attention --mask causal:64 --heads-q 2 --head-dim 8 --cp-size 2 --chunk-size 16";

/// Connects once something listens.
fn connect(port: u16) -> TcpStream {
    let began = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(began.elapsed() < SOON, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Strangers at the port before the ranks come: bytes of any kind, right beginnings, silence, and a thousand of them. None joins or
/// ends the job, and rank 1, which comes last, gets in.
#[test]
fn strangers_at_the_port_change_nothing() {
    println!("seed {SEED}");
    let mut random = StdRng::seed_from_u64(SEED);
    let (folder, place) = (Folder::new(), Place::new());
    let line = format!("{LINE} --limit 30");
    let mut ranks = Ranks::start([place.rank(&folder, &line, 0, 2)]);
    let mut open = Vec::new();
    for at in 0..1000 {
        let mut stream = connect(place.port + 1);
        let mut noise: Vec<u8> = (0..random.random_range(1..600)).map(|_| random.random()).collect();
        match at % 5 {
            0 => {}
            1 => noise = b"cntr".to_vec(),
            2 => noise.splice(0..0, *b"cntrpnt\n\x02\0\0\0").for_each(drop),
            // What the protocol of the first version began with.
            3 => {
                noise =
                    [&40u32.to_le_bytes()[..], &[0; 8], br#"{"protocol":1,"job":"port","rank":1"#].concat()
            }
            _ => {}
        }
        if at % 5 > 0 {
            stream.write_all(&noise).ok();
        }
        open.push(stream);
    }
    let second = Instant::now();
    ranks.processes.push(place.rank(&folder, &line, 1, 2).spawn().unwrap());
    ranks.end(SOON).iter().for_each(ProcessEnd::is_well);
    assert!(second.elapsed() < Duration::from_secs(25), "{:?}", second.elapsed());
}

/// One connection that says nothing holds nothing up: the rank that never comes is named at the limit.
#[test]
fn a_silent_connection_does_not_extend_the_limit() {
    let (folder, place) = (Folder::new(), Place::new());
    let ranks = Ranks::start([place.rank(&folder, &format!("{LINE} --limit 2"), 0, 2)]);
    let _silent: Vec<TcpStream> = (0..3).map(|_| connect(place.port + 1)).collect();
    ranks.end(Duration::from_secs(8))[0].says(1, &["waited 2.", "for rank 1, which never came"]);
}

/// Another secret is another job, whatever else is alike.
#[test]
fn a_rank_with_another_secret_is_of_no_use() {
    let folder = Folder::new();
    let place = Place { secret: Some("the secret of this job"), ..Place::new() };
    let other = Place { secret: Some("the secret of another job"), ..place.clone() };
    // On a busy machine one of them may begin seconds after the other.
    let line = format!("{LINE} --limit 10");
    let ended = Ranks::start([place.rank(&folder, &line, 0, 2), other.rank(&folder, &line, 1, 2)]).end(SOON);
    ended[0].says(1, &["for rank 1, which never came"]);
    ended[1].says(1, &["does not have this job's secret"]);
    let short = Place { secret: Some("short"), ..place.clone() };
    let ended = Ranks::start([short.rank(&folder, &line, 0, 2)]).end(SOON);
    ended[0].says(2, &["COUNTERPOINT_JOB_SECRET is too short"]);
    let both = [place.rank(&folder, &line, 0, 2), place.rank(&folder, &line, 1, 2)];
    Ranks::start(both).end(SOON).iter().for_each(ProcessEnd::is_well);
}

/// The reason outlasts what answered: a rank that looks on after a stranger has left still says who it was.
#[test]
fn a_stranger_that_left_is_still_named() {
    let folder = Folder::new();
    let place = Place { secret: Some("the secret of this job"), ..Place::new() };
    let stranger = TcpListener::bind(("127.0.0.1", place.port + 1)).unwrap();
    let ranks = Ranks::start([place.rank(&folder, &format!("{LINE} --limit 5"), 1, 2)]);
    let (mut stream, _) = stranger.accept().unwrap();
    stream.write_all(&[b'x'; 4096]).unwrap();
    // Until it has read that and closed.
    stream.read_to_end(&mut Vec::new()).ok();
    drop((stream, stranger));
    ranks.end(SOON)[0].says(1, &["is not counterpoint, and later: ", "refused"]);
}

/// What one would get for a job of several hosts without a secret.
#[test]
fn another_host_needs_a_secret() {
    // Set aside for documents: no host has it.
    let (folder, place) = (Folder::new(), Place { host: "203.0.113.7".to_owned(), ..Place::new() });
    let ended = Ranks::start([place.rank(&folder, LINE, 1, 2)]).end(SOON);
    ended[0].says(2, &["COUNTERPOINT_JOB_SECRET is not set", "rank 0 is on another host"]);
}

/// Two jobs at one port, of one user, with other inputs of one shape: no rank of one works for the other, and what is written is right.
#[test]
fn two_jobs_at_one_port_never_swap_ranks() {
    println!("seed {SEED}");
    let mut random = StdRng::seed_from_u64(SEED);
    let folder = Folder::new();
    for job in 0..2 {
        let mut tensors = qkv(Dtype::F32, 64, 2, 2, 8);
        for tensor in &mut tensors {
            *tensor = tensor.clone().with(job, 0.5);
        }
        folder.write(&format!("{job}.st"), safetensors(&tensors));
        let line = format!(
            "attention --mask causal:64 --input {job}.st --cp-size 2 --chunk-size 16 --output expected{job}.st"
        );
        folder.run(&line).ok();
    }
    let line = |job| {
        format!("attention --mask causal:64 --input {job}.st --cp-size 2 --output out{job}.st --limit 20")
    };
    let mut conflicts = 0;
    for round in 0..3 {
        let place = Place::new();
        let mut order = [(0, 0), (0, 1), (1, 0), (1, 1)];
        order.sort_by_key(|_| random.random::<u32>());
        let start = order.map(|(job, rank)| {
            // A job that goes on must still be there when the other comes.
            let slow = "--chunk-size 16 --slow-link 4000000,1";
            place.rank(&folder, &format!("{} {slow}", line(job)), rank, 2)
        });
        let ended = Ranks::start(start).end(SOON);
        for job in 0..2 {
            let of_job: Vec<&ProcessEnd> =
                (0..4).filter(|&at| order[at].0 == job).map(|at| &ended[at]).collect();
            let wells = of_job.iter().filter(|rank| rank.status == Some(0)).count();
            if wells == 2 {
                let name = |name: &str| folder.read(&format!("{name}{job}.st"));
                assert!(name("out") == name("expected"), "round {round}: job {job} is wrong");
            } else {
                assert_eq!(
                    wells,
                    0,
                    "round {round}, {order:?}: {:?}",
                    of_job.iter().map(|rank| &rank.stderr).collect::<Vec<_>>()
                );
                of_job.iter().for_each(|rank| {
                    rank.says(2, &["found another job at 127.0.0.1", "give each job a MASTER_PORT"])
                });
                conflicts += 1;
            }
            std::fs::remove_file(folder.path(&format!("out{job}.st"))).ok();
        }
    }
    assert!(conflicts > 0, "no job was in the way of another");
}

/// A copy of the input that is old in a single element, which the sample of its contents may leave out, and one of a file so small that
/// it is in it.
#[test]
fn a_stale_copy_of_the_input_is_noticed() {
    let folder = Folder::new();
    for (seqlen, element) in [(64, 63 * 16 + 1), (65_536, 65_000 * 16 + 3)] {
        let tensors = qkv(Dtype::F32, seqlen, 2, 2, 8);
        folder.write("0.st", safetensors(&tensors));
        let stale: Vec<_> = tensors
            .into_iter()
            .map(|tensor| if tensor.name == "v" { tensor.with(element, 0.25) } else { tensor })
            .collect();
        folder.write("1.st", safetensors(&stale));
        let lengths = vec!["64"; seqlen / 64].join(",");
        let line = |rank| {
            format!(
                "attention --mask varlen-full:lengths={lengths} --cp-size 2 --input {rank}.st --output out.st --dispatch sequential \
                 --limit 30"
            )
        };
        let place = Place::new();
        let ended = Ranks::start([0, 1].map(|rank| place.rank(&folder, &line(rank), rank, 2))).end(SOON);
        ended
            .iter()
            .for_each(|rank| rank.says(2, &["the ranks disagree", "--input", "SHA-256", "rank 0", "rank 1"]));
        assert_eq!(folder.names(), ["0.st", "1.st"]);
        // A copy that is the same may lie anywhere.
        std::fs::copy(folder.path("0.st"), folder.path("1.st")).unwrap();
        let place = Place::new();
        let ended = Ranks::start([0, 1].map(|rank| place.rank(&folder, &line(rank), rank, 2))).end(SOON);
        ended.iter().for_each(ProcessEnd::is_well);
        std::fs::remove_file(folder.path("out.st")).unwrap();
    }
}

/// Every flag is compared, and shown as it was written: within seconds, not at the limit.
#[test]
fn ranks_with_other_flags_are_named_soon() {
    let folder = Folder::new();
    folder.write("bad.json", "{}");
    for (first, second, words) in [
        (
            "--query-exchange never",
            "--query-exchange auto",
            "--query-exchange is never on rank 0 and auto on rank 1",
        ),
        ("--stages 1", "--stages 2", "--stages is 1 on rank 0 and 2 on rank 1"),
        ("--scale 0.5", "", "--scale is 0.5 on rank 0 and missing on rank 1"),
        ("--slow-link 1,1", "--slow-link 2,1", "--slow-link is 1,1 on rank 0 and 2,1 on rank 1"),
        ("--allow-non-finite", "", "--allow-non-finite is true on rank 0 and false on rank 1"),
        ("--cp-size 2", "--cp-size 3", "--cp-size is 2 on rank 0 and 3 on rank 1"),
        (
            "",
            "--profile bad.json",
            "the profile of --profile is missing on rank 0 and machine profile bad.json",
        ),
        ("", "--profile nowhere", "cannot be read"),
    ] {
        let line = |flags: &str| {
            let size = if flags.contains("--cp-size") { "" } else { "--cp-size 2" };
            format!("attention --mask causal:64 --heads-q 2 --head-dim 8 --limit 100 {size} {flags}")
        };
        let place = Place::new();
        let commands = [place.rank(&folder, &line(first), 0, 2), place.rank(&folder, &line(second), 1, 2)];
        let ended = Ranks::start(commands).end(Duration::from_secs(15));
        ended.iter().for_each(|rank| rank.says(2, &["the ranks disagree", words]));
    }
    // The same on all: nothing to compare, and as wrong.
    let place = Place::new();
    let line = format!("{LINE} --profile bad.json --limit 100");
    let ended =
        Ranks::start([0, 1].map(|rank| place.rank(&folder, &line, rank, 2))).end(Duration::from_secs(15));
    ended[0].says(2, &["bad.json"]);
    ended[1].says(1, &["rank 0 failed", "bad.json"]);
}

/// What another rank was given, and an error that it ended with, are shown on this rank's terminal and command nothing there.
#[test]
fn words_of_other_ranks_command_no_terminal() {
    let folder = Folder::new();
    let name = "x\u{1b}]0;title\u{7}\u{1b}[31m\u{9b}2J\r\nerror: forged\u{202e}y";
    folder.write(name, "{}");
    for given in [&[1][..], &[0, 1]] {
        let place = Place::new();
        let rank = |rank| {
            let mut command = place.rank(&folder, &format!("{LINE} --limit 20"), rank, 2);
            if given.contains(&rank) {
                command.args(["--profile", name]);
            }
            command
        };
        let ended = Ranks::start([0, 1].map(rank)).end(SOON);
        for ProcessEnd { status, stderr } in ended {
            assert!(status != Some(0) && stderr.contains("x\\x1b]0;title\\x07"), "{stderr}");
            let commands = |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
            assert!(!stderr.chars().any(commands), "{stderr:?}");
            assert!(!stderr.lines().any(|line| line.starts_with("error: forged")), "{stderr:?}");
        }
    }
}

/// The address by which other hosts know this one, if it has any.
fn own_address() -> Option<IpAddr> {
    let output = Command::new("hostname").arg("-I").output().ok()?;
    let addresses = String::from_utf8(output.stdout).ok()?;
    let addresses = addresses.split_whitespace().filter_map(|address| address.parse::<IpAddr>().ok());
    addresses.into_iter().find(|address| address.is_ipv4() && UdpSocket::bind((*address, 0)).is_ok())
}

#[test]
fn ranks_join_at_this_hosts_own_address() {
    let Some(address) = own_address() else {
        println!("this machine has no address but the loopback");
        return;
    };
    let folder = Folder::new();
    for (secret, ranks) in [(None, 3), (Some("sixteen characters"), 2)] {
        for local_size in [None, Some(ranks)] {
            let place = Place { host: address.to_string(), secret, ..Place::new() };
            let line = format!(
                "attention --mask causal:64 --heads-q 2 --head-dim 8 --cp-size {ranks} --check --limit 20"
            );
            let commands = (0..ranks).map(|rank| {
                let mut command = place.rank(&folder, &line, rank, ranks);
                local_size.map(|size: usize| command.env("LOCAL_WORLD_SIZE", size.to_string()));
                command
            });
            Ranks::start(commands).end(SOON).iter().for_each(ProcessEnd::is_well);
        }
    }
}

/// A rank that has stopped, and a mask that is larger than what buffers hold: one limit in all, and the one that stopped is named.
#[test]
fn a_stopped_rank_costs_one_limit_and_is_named() {
    let folder = Folder::new();
    assert!(Command::new("mkfifo").arg(folder.path("mask.json")).status().unwrap().success());
    let slice = |at: usize| format!(r#"{{"q":[{at},{}],"k":[{at},{}],"type":"full"}}"#, at + 1, at + 1);
    let tokens = 200_000;
    let slices: Vec<String> = (0..tokens).map(slice).collect();
    let mask = format!(r#"{{"seqlen_q":{tokens},"seqlen_k":{tokens},"slices":[{}]}}"#, slices.join(","));
    // Rank 0 reads and plans the mask meanwhile, which a busy machine makes long.
    folder.write("same.json", &mask);
    let began = Instant::now();
    folder.run("mask same.json --svg same.svg").ok();
    let limit = 6 + 2 * began.elapsed().as_secs();
    let line = format!(
        "attention --mask mask.json --heads-q 1 --head-dim 1 --cp-size 3 --stages 1 --dispatch sequential --chunk-size 1024 --limit {limit}"
    );
    let place = Place::new();
    let mut ranks = Ranks::start((0..3).map(|rank| place.rank(&folder, &line, rank, 3)));
    // It has asked for the mask, which rank 0 waits for.
    (0..3).for_each(|rank| ranks.wait_for_thread(rank, &format!("rank {rank} rendez")));
    thread::sleep(Duration::from_millis(500));
    ranks.signal(2, "-STOP");
    std::fs::write(folder.path("mask.json"), mask).unwrap();
    let written = ranks.began.elapsed();
    let ended = ranks.end_of(&[0, 1], written + Duration::from_secs(2 * limit));
    ended.iter().for_each(|rank| rank.says(1, &["rank 2"]));
    ranks.signal(2, "-CONT");
}

/// Too few descriptors are said to be that, not ranks that never come.
#[test]
fn descriptors_that_are_used_up_are_named() {
    let (folder, place) = (Folder::new(), Place::new());
    let line = "attention --mask causal:128 --heads-q 2 --head-dim 8 --cp-size 8 --limit 20";
    let starved = |descriptors: u32| {
        let mut command = Command::new("sh");
        let limited = format!("ulimit -n {descriptors}; exec {} {line}", env!("CARGO_BIN_EXE_counterpoint"));
        command.args(["-c", &limited]);
        place.launched(&mut command, &folder, 0, 8);
        command
    };
    // Enough to listen, and too few to listen to all.
    let others = (1..8).map(|rank| place.rank(&folder, line, rank, 8));
    let ended = Ranks::start([starved(20)].into_iter().chain(others)).end(Duration::from_secs(15));
    ended[0].says(3, &["rank 0 has no file descriptors left", "at most 20", "ulimit -n"]);
    assert!(ended[1..].iter().all(|rank| rank.status != Some(0) && rank.stderr.contains("rank 0")));
    // Too few for anything.
    let ended = Ranks::start([starved(9)]).end(Duration::from_secs(15));
    ended[0].says(3, &["rank 0 has no file descriptors left", "at most 9"]);
}
