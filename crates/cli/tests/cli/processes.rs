//! One rank a process, as a launcher starts them: results, faults, and that nothing is left behind.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use safetensors::Dtype;

use crate::support::{Folder, qkv, safetensors};

/// Small, so that processes that share two cores are soon through.
const PROBLEM: &str = "attention --mask varlen-causal:lengths=150,362 --heads-q 4 --heads-kv 2 --head-dim 16";

/// Processes of one job. Those that still run are killed when it is dropped.
struct Job {
    processes: Vec<Child>,
    began: Instant,
}

/// How one of them ended.
struct ProcessEnd {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A process with torchrun's variables.
fn rank(folder: &Folder, line: &str, rank: usize, world_size: usize, port: u16) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_counterpoint"));
    command.current_dir(folder.path(".")).args(line.split_whitespace()).env_remove("RUST_BACKTRACE");
    launched(&mut command, rank, world_size, port);
    command
}

fn launched(command: &mut Command, rank: usize, world_size: usize, port: u16) {
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world_size.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        // The next ports are taken.
        .env("MASTER_PORT", (port - 1).to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
}

impl Job {
    /// Starts `world_size` processes of one command line, which may have `{rank}` in it.
    fn start(folder: &Folder, line: &str, world_size: usize) -> Self {
        let port = free_port();
        let of_rank =
            |at: usize| rank(folder, &line.replace("{rank}", &at.to_string()), at, world_size, port);
        Self::of((0..world_size).map(of_rank))
    }

    fn of(commands: impl Iterator<Item = Command>) -> Self {
        let began = Instant::now();
        Self { processes: commands.map(|mut command| command.spawn().unwrap()).collect(), began }
    }

    fn signal(&self, rank: usize, signal: &str) {
        let id = self.processes[rank].id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Waits until every process has connections to the others: the names of its threads say.
    fn wait_until_connected(&self) {
        let connected = |process: &Child| {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", process.id()));
            let names = tasks.into_iter().flatten().flatten().map(|task| task.path().join("comm"));
            names.filter_map(|name| std::fs::read_to_string(name).ok()).any(|name| name.contains(" from "))
        };
        while !self.processes.iter().all(connected) {
            assert!(self.began.elapsed() < SOON, "the ranks have not joined");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for all, which must end within `limit` of the start.
    fn end(mut self, limit: Duration) -> Vec<ProcessEnd> {
        for (rank, process) in self.processes.iter_mut().enumerate() {
            while process.try_wait().unwrap().is_none() {
                assert!(self.began.elapsed() < limit, "rank {rank} still runs after {limit:?}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        self.processes
            .drain(..)
            .map(|process| {
                let Output { status, stdout, stderr } = process.wait_with_output().unwrap();
                ProcessEnd { status: status.code(), stdout: text(stdout), stderr: text(stderr) }
            })
            .collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in &mut self.processes {
            process.kill().ok();
            process.wait().ok();
        }
    }
}

impl ProcessEnd {
    /// One sentence on stderr with all `words`, and `status`.
    fn is_error(&self, status: i32, words: &[&str]) {
        let Self { stdout, stderr, .. } = self;
        assert_eq!(self.status, Some(status), "{stdout}\n{stderr}");
        assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{stderr}");
        for word in words {
            assert!(stderr.contains(word), "no `{word}` in {stderr}");
        }
    }
}

/// Longer than anything here takes, shorter than the limits that must not be reached.
const SOON: Duration = Duration::from_secs(60);

#[test]
fn results_are_those_of_threads_to_the_last_bit() {
    let folder = Folder::new();
    folder.write("in.st", safetensors(&qkv(Dtype::BF16, 200, 4, 2, 16)));
    let from_file = "attention --mask causal:200 --input in.st --chunk-size 16";
    for (problem, ranks) in [(PROBLEM, 2), (PROBLEM, 3), (from_file, 4)] {
        let line = format!("{problem} --cp-size {ranks} --stages 2 --backward --check");
        folder.run(&format!("{line} --output threads.st")).ok();
        let line = format!("{line} --output out.st --report report.html --json --limit 60");
        let ended = Job::start(&folder, &line, ranks).end(SOON);
        for (rank, ProcessEnd { status, stdout, stderr }) in ended.iter().enumerate() {
            assert_eq!((*status, stderr.as_str()), (Some(0), ""), "rank {rank}: {stdout}");
            assert_eq!(stdout.is_empty(), rank > 0, "rank {rank}: {stdout}");
        }
        let document: serde_json::Value = serde_json::from_str(&ended[0].stdout).unwrap();
        assert_eq!(document["check"]["passed"], true);
        assert_eq!(document["cp_size"], ranks);
        assert!(document["overlap"]["communication_seconds"].as_f64().unwrap() > 0.0);
        assert!(folder.read("out.st") == folder.read("threads.st"), "{line}");
        assert!(folder.read("report.html").len() > 10_000);
    }
    assert_eq!(folder.names(), ["in.st", "out.st", "report.html", "threads.st"]);
}

#[test]
fn the_number_of_processes_must_be_that_of_ranks() {
    let folder = Folder::new();
    let ended = Job::start(&folder, &format!("{PROBLEM} --cp-size 3"), 2).end(SOON);
    for rank in &ended {
        rank.is_error(2, &["--cp-size 3", "torchrun started 2", "start as many as ranks"]);
    }
    let ended =
        Job::start(&folder, &format!("{PROBLEM} --cp-size 2 --device cuda --dtype bf16"), 2).end(SOON);
    if !std::path::Path::new("/dev/nvidia0").exists() {
        ended.iter().for_each(|rank| rank.is_error(3, &[]));
    }
    let mut half = rank(&folder, &format!("{PROBLEM} --cp-size 2"), 0, 2, free_port());
    half.env_remove("WORLD_SIZE");
    Job::of([half].into_iter()).end(SOON)[0].is_error(2, &["WORLD_SIZE is not set, but RANK is"]);
}

#[test]
fn ranks_that_were_given_different_things_are_refused() {
    let folder = Folder::new();
    folder.write("0.st", safetensors(&qkv(Dtype::F32, 64, 4, 2, 16)));
    folder.write("1.st", safetensors(&qkv(Dtype::F32, 64, 4, 2, 32)));
    folder.write("2.st", safetensors(&qkv(Dtype::F32, 64, 4, 2, 16)));
    for (line, words) in [
        (
            "attention --mask causal:51{rank} --cp-size 3",
            &["--mask", "causal:510 on rank 0", "causal:511 on rank 1"][..],
        ),
        ("attention --mask causal:64 --cp-size 3 --seed {rank}", &["--seed", "rank 0", "rank 2"]),
        (
            "attention --mask causal:64 --cp-size 3 --input {rank}.st --output out{rank}.st",
            &[
                "what --input holds is dout F32 [64, 4, 16]",
                "on ranks 0 and 2 and dout F32 [64, 4, 32]",
                "on rank 1",
            ],
        ),
    ] {
        let ended = Job::start(&folder, &format!("{line} --limit 100"), 3).end(SOON);
        ended.iter().for_each(|rank| rank.is_error(2, words));
    }
    assert_eq!(folder.names(), ["0.st", "1.st", "2.st"]);
}

#[test]
fn what_only_one_rank_finds_wrong_ends_all_and_names_it() {
    let folder = Folder::new();
    let line = "attention --mask nowhere.json --cp-size 3 --limit 100";
    let ended = Job::start(&folder, line, 3).end(SOON);
    ended[0].is_error(2, &["mask file nowhere.json cannot be read"]);
    ended[1..]
        .iter()
        .for_each(|rank| rank.is_error(1, &["rank 0 failed: mask file nowhere.json cannot be read"]));

    // In the last row, which only its owner reads.
    let spoilt = qkv(Dtype::F32, 64, 4, 2, 16).into_iter().map(|tensor| match tensor.name {
        "k" => tensor.with(63 * 32, f64::NAN),
        _ => tensor,
    });
    folder.write("in.st", safetensors(&spoilt.collect::<Vec<_>>()));
    let line = "attention --mask full:64 --cp-size 2 --chunk-size 32 --dispatch sequential --limit 100 \
                --input in.st --output out.st";
    let ended = Job::start(&folder, line, 2).end(SOON);
    ended[1].is_error(2, &["in.st: tensor `k` holds NaN at [63, 0, 0]"]);
    ended[0].is_error(1, &["rank 1 failed: in.st: tensor `k` holds NaN at [63, 0, 0]"]);
    assert_eq!(folder.names(), ["in.st"]);
}

#[test]
fn ranks_that_never_come_are_named() {
    let folder = Folder::new();
    let port = free_port();
    let line = format!("{PROBLEM} --cp-size 4 --limit 2");
    let ended = Job::of([0, 3].into_iter().map(|at| rank(&folder, &line, at, 4, port))).end(SOON);
    ended.iter().for_each(|rank| rank.is_error(1, &["waited 2.", "for ranks 1 and 2, which never came"]));
    // Connection refused: nobody listens where rank 0 should be.
    let ended = Job::of([rank(&folder, &line, 1, 4, free_port())].into_iter()).end(SOON);
    ended[0].is_error(1, &["rank 1 did not reach rank 0 at 127.0.0.1", "refused"]);
}

/// Every collective takes at least a second, so that a run is always in one.
const SLOW: &str = "--stages 3 --slow-link 1000000,1 --backward";

#[test]
fn a_rank_that_is_killed_at_any_time_ends_all_and_is_named() {
    for (round, victim) in [1, 0, 2, 1, 2].into_iter().enumerate() {
        let folder = Folder::new();
        let line = format!("{PROBLEM} --cp-size 3 {SLOW} --limit 40 --output out.st");
        let job = Job::start(&folder, &line, 3);
        // From before the ranks have joined to the middle of the forward.
        if round > 1 {
            job.wait_until_connected();
        }
        std::thread::sleep(Duration::from_millis([20, 350, 50, 600, 1200][round]));
        job.signal(victim, "-KILL");
        let ended = job.end(SOON);
        assert_eq!(ended[victim].status, None, "killed");
        for (rank, ended) in ended.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            // The first strike before all have joined: who comes to nobody says so.
            ended.is_error(1, &["rank"]);
            if round > 1 {
                let (named, doing) = (format!("rank {victim} is gone"), format!("rank {rank} meanwhile:"));
                ended.is_error(1, &[&named, &doing]);
            }
        }
        assert_eq!(folder.names(), [] as [&str; 0], "round {round}");
    }
}

#[test]
fn a_rank_that_stops_is_blamed_when_the_limit_is_over() {
    let folder = Folder::new();
    let line = format!(
        "{PROBLEM} --cp-size 3 --stages 4 --slow-link 1000000,1 --backward --limit 8 --output out.st"
    );
    let job = Job::start(&folder, &line, 3);
    job.wait_until_connected();
    // In the first collective, which takes a second.
    std::thread::sleep(Duration::from_millis(600));
    job.signal(1, "-STOP");
    std::thread::sleep(Duration::from_secs(13));
    job.signal(1, "-CONT");
    let ended = job.end(SOON);
    // Whoever reached the limit first, a collective or what waits for it, says where, and that the rank does not answer. When
    // that one goes on, it hears so itself, finds its own limit over or the others gone, whichever of its threads is first.
    for rank in [&ended[0], &ended[2]] {
        rank.is_error(1, &["waited 8.", "`cast k v` (stage", "held up by rank 1", "does not answer"]);
    }
    ended[1].is_error(1, &["rank 1"]);
    assert_eq!(folder.names(), [] as [&str; 0]);
}

#[test]
fn memory_that_one_rank_lacks_ends_all() {
    let folder = Folder::new();
    let port = free_port();
    let line = "attention --mask full:8192 --cp-size 2 --heads-q 16 --head-dim 128 --limit 60";
    let starved = |at: usize| {
        let mut command = Command::new("sh");
        let limited = format!("ulimit -v 400000; exec {} {line}", env!("CARGO_BIN_EXE_counterpoint"));
        command.current_dir(folder.path(".")).args(["-c", &limited]);
        launched(&mut command, at, 2, port);
        command
    };
    let ended = Job::of([rank(&folder, line, 0, 2, port), starved(1)].into_iter()).end(SOON);
    assert_ne!(ended[1].status, Some(0), "{}", ended[1].stderr);
    ended[0].is_error(1, &["rank 1"]);
}

/// The most memory that each process of a job had, in bytes, at the end of all.
fn peaks(job: &mut Job) -> Vec<u64> {
    let mut peaks = vec![0; job.processes.len()];
    while job.processes.iter_mut().any(|process| process.try_wait().unwrap().is_none()) {
        assert!(job.began.elapsed() < SOON, "it has not ended");
        for (process, peak) in job.processes.iter().zip(&mut peaks) {
            let status =
                std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            *peak = kibibytes.map_or(*peak, |kibibytes| 1024 * kibibytes);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    peaks
}

/// Tensors twice, once in global order and once on the ranks, is what the check of memory counts; besides them each process has its code
/// and what it takes for itself.
#[test]
fn processes_take_the_memory_that_is_predicted() {
    let folder = Folder::new();
    folder.write("lengths", "64\n".repeat(128));
    let (tokens, heads, head_dim, ranks) = (64 * 128, 8, 128, 3);
    let line = format!(
        "attention --mask varlen-full:lengths=@lengths --heads-q {heads} --head-dim {head_dim} --cp-size {ranks} --output out.st"
    );
    let mut job = Job::start(&folder, &line, ranks);
    let peaks = peaks(&mut job);
    assert!(job.end(SOON).iter().all(|rank| rank.status == Some(0)));
    let predicted = 2 * 4 * tokens * heads * head_dim * 4;
    let of_process = 60 << 20;
    let all: u64 = peaks.iter().sum();
    assert!(all < predicted + ranks as u64 * of_process, "{peaks:?}, predicted {predicted}");
}

#[test]
fn an_interruption_ends_all() {
    let folder = Folder::new();
    let line = format!("{PROBLEM} --cp-size 2 {SLOW} --limit 50 --output out.st");
    // Every process gets it, as from a terminal.
    let job = Job::start(&folder, &line, 2);
    job.wait_until_connected();
    std::thread::sleep(Duration::from_millis(300));
    (0..2).for_each(|rank| job.signal(rank, "-INT"));
    let ended = job.end(SOON);
    assert!(ended.iter().any(|rank| rank.status == Some(130)));
    assert!(ended.iter().all(|rank| matches!(rank.status, Some(130 | 1))));
    // One of them does: the other hears of it.
    let job = Job::start(&folder, &line, 2);
    job.wait_until_connected();
    std::thread::sleep(Duration::from_millis(300));
    job.signal(1, "-INT");
    let ended = job.end(SOON);
    assert_eq!(ended[1].status, Some(130));
    ended[0].is_error(1, &["rank 1 is gone"]);
    assert_eq!(folder.names(), [] as [&str; 0]);
}

/// Two nodes of one process each, whose network takes nearly all of the time: by its bytes, by its starts, and by both. Seconds of it, so
/// that what else the machine does is little compared with them.
#[test]
fn a_run_over_a_slow_network_takes_what_is_predicted() {
    let seconds = |document: &serde_json::Value, key: &str| {
        ["forward", "backward"].iter().map(|pass| document[key][pass].as_f64().unwrap()).sum::<f64>()
    };
    for network in ["1000,0.00005", "1000000,1", "400000,0.0001"] {
        let line = format!(
            "attention --mask full:512 --heads-q 2 --head-dim 16 --cp-size 2 --nodes 2 --slow-network {network} --backward --json"
        );
        let ratio = || {
            let folder = Folder::new();
            let ended = Job::start(&folder, &line, 2).end(SOON);
            assert_eq!(ended[0].status, Some(0), "{}", ended[0].stderr);
            let document = serde_json::from_str(&ended[0].stdout).unwrap();
            let (measured, predicted) =
                (seconds(&document, "seconds"), seconds(&document, "predicted_seconds"));
            println!("{network}: {measured:.3} s, predicted {predicted:.3} s");
            measured / predicted
        };
        let mut ratios = Vec::new();
        while ratios.last().is_none_or(|ratio: &f64| (ratio - 1.0).abs() > 0.15) {
            ratios.push(ratio());
            // The network is never faster than it is set to be; a machine that does much else may be slow once, or twice.
            assert!(ratios.iter().all(|ratio| *ratio > 0.85) && ratios.len() < 6, "{network}: {ratios:?}");
        }
    }
}

/// What is tuned there is kept once, for ranks that send rows through TCP, and followed by them.
#[test]
fn layers_are_tuned_with_ranks_that_are_processes() {
    let folder = Folder::new();
    let gemm = "tune gemm --m 64 --n 32 --k 32 --collective reduce-scatter --iterations 1 --warmups 0";
    let layers =
        "--tokens 20 --hidden 8 --inner 8 --experts 4 --iterations 3 --gradient written --kinds combine";
    let ran = |line: &str| -> Vec<serde_json::Value> {
        let ended = Job::start(&folder, line, 2).end(SOON);
        for (rank, ProcessEnd { status, stdout, stderr }) in ended.iter().enumerate() {
            assert_eq!(*status, Some(0), "rank {rank}: {stdout}{stderr}");
            assert_eq!(stdout.is_empty(), rank > 0, "rank {rank}: {stdout}");
        }
        serde_json::Deserializer::from_str(&ended[0].stdout).into_iter().map(Result::unwrap).collect()
    };
    assert_eq!(ran(&format!("{gemm} --plans plans.json --json"))[0]["shape"]["transport"], "tcp");
    assert_eq!(ran(&format!("tune moe {layers} --trials 2 --plans plans.json --json")).len(), 2);
    let file: serde_json::Value = serde_json::from_slice(&folder.read("plans.json")).unwrap();
    for (kind, least) in [("plans", 3), ("experts", 4)] {
        let plans = file[kind].as_array().unwrap();
        assert!(plans.len() >= least, "{file}");
        assert!(plans.iter().all(|plan| plan["transport"] == "tcp" && plan["ranks"] == 2), "{file}");
    }
    // The sequential run and one way, of two passes.
    assert_eq!(ran(&format!("bench moe {layers} --overlap signals --json")).len(), 4);
    let ended = Job::start(&folder, &format!("{gemm} --plans plans.json --tp-size 3"), 2).end(SOON);
    ended.iter().for_each(|rank| rank.is_error(2, &["--tp-size 3", "torchrun started 2"]));
}

/// `bench tp` times layers there too, also with a norm behind them and layers of one input, and their bits are those of threads.
#[test]
fn linear_layers_are_timed_with_ranks_that_are_processes() {
    let folder = Folder::new();
    let documents = |text: &str| -> Vec<serde_json::Value> {
        serde_json::Deserializer::from_str(text).into_iter().map(Result::unwrap).collect()
    };
    let small = "bench tp --shapes 32:16:8 --iterations 3 --overlap signals --json";
    for (what, rows) in [("--bias", 16), ("--kinds row --rms-norm", 8), ("--shared-input 2", 12)] {
        let line = format!("{small} {what}");
        let ended = Job::start(&folder, &line, 2).end(SOON);
        for (rank, ProcessEnd { status, stdout, stderr }) in ended.iter().enumerate() {
            assert_eq!(*status, Some(0), "{what}, rank {rank}: {stdout}{stderr}");
            assert_eq!(stdout.is_empty(), rank > 0, "{what}, rank {rank}: {stdout}");
        }
        let processes = documents(&ended[0].stdout);
        assert_eq!(processes.len(), rows, "{what}");
        assert!(
            processes.iter().all(|row| row["ranks"] == 2 && row["seconds"]["count"] == 3),
            "{processes:?}"
        );
        let threads = documents(&folder.run(&line).ok().stdout);
        let bits =
            |rows: &[serde_json::Value]| rows.iter().map(|row| row["bits"].clone()).collect::<Vec<_>>();
        assert_eq!(bits(&processes), bits(&threads), "{what}");
    }
    let ended = Job::start(&folder, &format!("{small} --transport nccl"), 2).end(SOON);
    ended.iter().for_each(|rank| rank.is_error(2, &["--transport", "GPUs"]));
}
