//! This program, started as several processes, as a launcher would.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{io, thread};

use counterpoint_console::{OwnProcess, program};

use super::worker::visible;

/// Between looks at processes.
const LOOK: Duration = Duration::from_millis(10);

/// Processes of one job, by rank.
pub(super) struct Job {
    processes: Vec<OwnProcess>,
    texts: Vec<PathBuf>,
}

/// How a process ended.
pub(super) struct ProcessEnd {
    /// Its exit status; `None` when a signal ended it, ours among them.
    pub(super) code: Option<i32>,
    /// All that it said.
    pub(super) text: String,
    /// What its threads did at the limit, where it had not ended.
    pub(super) threads: Option<String>,
}

/// How a process ended, for people.
pub(super) fn how(code: Option<i32>) -> String {
    code.map_or_else(|| "a signal".to_owned(), |code| format!("status {code}"))
}

/// Starts a process for each of these command lines, its words apart by spaces, as ranks of one job; a single one alone.
/// `name` is that of their files in `folder`. `gpus` hides all but one GPU from each.
pub(super) fn start(folder: &Path, name: &str, lines: &[String], gpus: Gpus) -> io::Result<Job> {
    start_at(folder, name, lines, gpus, free_port()?)
}

/// A port after which there are some that are likely to be free.
pub(super) fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port().min(u16::MAX - 16))
}

/// As [`start`]; the rendezvous is behind `port`.
pub(super) fn start_at(
    folder: &Path,
    name: &str,
    lines: &[String],
    gpus: Gpus,
    port: u16,
) -> io::Result<Job> {
    let mut job = Job { processes: Vec::new(), texts: Vec::new() };
    for (rank, line) in lines.iter().enumerate() {
        let text = folder.join(format!("{name}.{rank}.txt"));
        let file = File::create(&text)?;
        let mut command = Command::new(program::file()?);
        command.args(line.split_whitespace()).stdin(Stdio::null());
        command.stdout(file.try_clone()?).stderr(file);
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
            command.env_remove(variable);
        }
        if lines.len() > 1 {
            let (rank, ranks) = (rank.to_string(), lines.len().to_string());
            command.env("RANK", &rank).env("LOCAL_RANK", &rank);
            command.env("WORLD_SIZE", &ranks).env("LOCAL_WORLD_SIZE", &ranks);
            // The ports after it are those of the rendezvous.
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            command.env("TORCHELASTIC_RUN_ID", format!("{name} {port}"));
            if gpus == Gpus::OwnOnly {
                command.env("CUDA_VISIBLE_DEVICES", visible(job.processes.len()));
            }
        }
        job.processes.push(OwnProcess::start(&mut command)?);
        job.texts.push(text);
    }
    Ok(job)
}

/// The threads of a process, each with its state and where the system has it wait, as far as the system says.
fn threads(process: u32) -> String {
    let known = |file: PathBuf| fs::read_to_string(file).unwrap_or_default();
    let one = |thread: &Path| {
        let name = known(thread.join("comm"));
        let status = known(thread.join("status"));
        let state = status.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or("?");
        let state = state.trim().chars().next().unwrap_or('?');
        format!("{} {state} {}", name.trim_end(), known(thread.join("wchan")))
    };
    let tasks = fs::read_dir(format!("/proc/{process}/task"));
    let tasks = tasks.into_iter().flatten().flatten().map(|entry| one(&entry.path()));
    tasks.collect::<Vec<_>>().join(", ")
}

/// What GPUs a process sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gpus {
    All,
    /// That with the number of its rank.
    OwnOnly,
}

impl Job {
    /// What a rank has said so far.
    pub(super) fn text(&self, rank: usize) -> String {
        fs::read(&self.texts[rank])
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .unwrap_or_default()
    }

    /// Waits until `ready`, for `limit` at most and while all processes run; whether it came to that.
    pub(super) fn wait_for(&self, limit: Duration, ready: impl Fn(&Self) -> bool) -> bool {
        let began = Instant::now();
        while !ready(self) {
            if self.processes.iter().any(|process| !process.runs()) || began.elapsed() > limit {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// Sends a signal to a rank's process.
    pub(super) fn signal(&self, rank: usize, signal: &str) -> io::Result<()> {
        let process = self.processes[rank].id().to_string();
        let kill = counterpoint_files::program("kill").map_err(io::Error::other)?;
        let status = counterpoint_files::command(&kill).args(["-s", signal, &process]).status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("kill -s {signal}: {status}"))) }
    }

    /// Waits until the processes of `ranks` have ended, for `limit` at most. All that still run then are killed.
    pub(super) fn end(self, ranks: &[usize], limit: Duration) -> Vec<ProcessEnd> {
        let began = Instant::now();
        while ranks.iter().any(|rank| self.processes[*rank].runs()) && began.elapsed() < limit {
            thread::sleep(LOOK);
        }
        let end = |process: &OwnProcess| {
            let status = process.status().ok().flatten();
            let threads = process.runs().then(|| threads(process.id()));
            process.end();
            (status.and_then(|status| status.code()), threads)
        };
        // What they said is read when none of them says more.
        let ended: Vec<_> = self.processes.iter().map(end).collect();
        let of_rank = |(rank, (code, threads))| ProcessEnd { code, text: self.text(rank), threads };
        ended.into_iter().enumerate().map(of_rank).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_their_numbers_and_how_they_ended_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        // The test's own binary: with such arguments it lists its tests, or fails.
        let lines = ["--list".to_owned(), "--no-such-flag".to_owned()];
        let job = start(folder.path(), "list", &lines, Gpus::All).unwrap();
        let ended = job.end(&[0, 1], Duration::from_secs(60));
        assert_eq!(ended[0].code, Some(0), "{}", ended[0].text);
        assert!(ended[0].text.contains("ranks_get_their_numbers"), "{}", ended[0].text);
        assert!(ended[1].code.is_some_and(|code| code != 0), "{}", ended[1].text);
    }

    #[test]
    fn of_a_process_that_does_not_end_it_is_reported_what_its_threads_do() {
        let own = threads(std::process::id());
        let [name, state] = own.split(' ').take(2).collect::<Vec<_>>()[..] else { panic!("{own}") };
        assert!(!name.is_empty() && ["R", "S"].contains(&state), "{own}");
    }
}
