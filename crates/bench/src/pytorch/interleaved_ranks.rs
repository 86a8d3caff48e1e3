//! Ways of PyTorch whose runs are interleaved with ours: ranks of a script, each of which runs a command and waits for the next one
//! (`benches/peers/common/interleaved.py`).

use std::io::Write;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_console::{CliError, OwnProcess, PeersFault, PyTorchFault};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{PAUSE, PyTorchNeeds, Script, ended_badly, read_lines};

/// To start, connect and make a case ready, compiling included. Their own collectives end after two minutes.
const LIMIT: Duration = Duration::from_secs(300);

/// For ranks to end when there are no more requests.
const PARTING: Duration = Duration::from_secs(5);

/// The ranks of one script.
pub(crate) struct InterleavedRanks {
    ranks: Vec<Rank>,
    needs: PyTorchNeeds,
    limit: Duration,
    /// Its files: it reads some when it wants them.
    _script: Option<Script>,
}

struct Rank {
    process: OwnProcess,
    requests: ChildStdin,
    answers: Receiver<String>,
}

impl InterleavedRanks {
    /// Starts `commands`, those of `script`, a process a rank. Where the script ends with status 3, the machine does not have what it `needs`.
    pub(crate) fn start(
        script: Script,
        commands: Vec<Command>,
        needs: PyTorchNeeds,
    ) -> Result<Self, CliError> {
        Ok(Self { _script: Some(script), ..Self::of(commands, needs)? })
    }

    fn of(commands: Vec<Command>, needs: PyTorchNeeds) -> Result<Self, CliError> {
        let start = |mut command: Command| {
            command.arg("--turns").stdin(Stdio::piped()).stdout(Stdio::piped());
            let started = OwnProcess::start(&mut command)
                .map_err(|error| CliError::no_peers(PeersFault::NoStart(error)))?;
            let pipes = started.stdin().zip(started.stdout());
            let (requests, stdout) = pipes.ok_or_else(|| CliError::no_peers(PeersFault::NoPipes))?;
            Ok(Rank { process: started, requests, answers: read_lines(stdout) })
        };
        let ranks = commands.into_iter().map(start).collect::<Result<_, CliError>>()?;
        Ok(Self { ranks, needs, limit: LIMIT, _script: None })
    }

    /// Has a case made ready instead of the one before, and gives what is known of each of its ways. Those that PyTorch has not, or that
    /// err, are left out.
    pub(super) fn prepare<T: DeserializeOwned>(&mut self, case: &impl Serialize) -> Result<Vec<T>, CliError> {
        let of_ranks: Vec<Vec<T>> = self.ask(&json!({ "case": case }))?;
        let counts: Vec<usize> = of_ranks.iter().map(Vec::len).collect();
        if counts.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(CliError::check(PyTorchFault::UnlikeCounts { counts }));
        }
        Ok(of_ranks.into_iter().next().unwrap_or_default())
    }

    /// Runs a way of the case once, for which devices are held for `hold` seconds: seconds of the slowest rank, and those in which
    /// the slowest host enqueued it.
    pub(super) fn run(&mut self, variant: usize, hold: f64) -> Result<[f64; 2], CliError> {
        let of_ranks: Vec<[f64; 2]> = self.ask(&json!({ "run": variant, "hold": hold }))?;
        Ok(of_ranks.into_iter().fold([0.0; 2], |[a, b], [c, d]| [a.max(c), b.max(d)]))
    }

    /// Lets the ranks end by themselves, as all do when there are no more requests: of one that is killed the others complain.
    pub(super) fn part(self) {
        let processes: Vec<OwnProcess> = self.ranks.into_iter().map(|rank| rank.process).collect();
        let deadline = Instant::now() + PARTING;
        while processes.iter().any(OwnProcess::runs) && Instant::now() < deadline {
            thread::sleep(PAUSE);
        }
    }

    /// The same request to all ranks, and the answer of each.
    fn ask<T: DeserializeOwned>(&mut self, request: &serde_json::Value) -> Result<Vec<T>, CliError> {
        let mut unheard = None;
        for Rank { requests, .. } in &mut self.ranks {
            // Whoever does not listen has ended, which is looked at below.
            unheard = unheard.or(writeln!(requests, "{request}").and_then(|()| requests.flush()).err());
        }
        let deadline = Instant::now() + self.limit;
        let mut answers = Vec::new();
        for number in 0..self.ranks.len() {
            let line = self.answer(number, deadline)?;
            let answer = serde_json::from_str(&line);
            let unread = |source| CliError::check(PyTorchFault::Answer { rank: number, line, source });
            answers.push(answer.map_err(unread)?);
        }
        match unheard {
            None => Ok(answers),
            Some(error) => Err(CliError::check(PyTorchFault::Deaf(error))),
        }
    }

    fn answer(&self, number: usize, deadline: Instant) -> Result<String, CliError> {
        loop {
            match self.ranks[number].answers.recv_timeout(PAUSE) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Timeout) => {}
                // It has closed its output, and is about to end.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(PAUSE),
            }
            self.look(number, deadline)?;
        }
    }

    /// Whether rank `number` may still answer: all ranks run, and there is time.
    fn look(&self, number: usize, deadline: Instant) -> Result<(), CliError> {
        for Rank { process, .. } in &self.ranks {
            let status = process.status().map_err(|error| CliError::no_peers(PeersFault::NoStatus(error)))?;
            match status {
                None => {}
                Some(status) if status.success() => return Err(CliError::check(PyTorchFault::EndedEarly)),
                Some(status) => return Err(ended_badly(status, self.needs)),
            }
        }
        if Instant::now() < deadline {
            return Ok(());
        }
        Err(CliError::check(PyTorchFault::NoAnswer { rank: number, seconds: self.limit.as_secs() }))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Ranks that are `sh`, each running `script` with its number as `$RANK`.
    pub(in super::super) fn ranks(script: &str, count: usize) -> InterleavedRanks {
        let rank = |rank: usize| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).env("RANK", rank.to_string());
            command
        };
        InterleavedRanks::of((0..count).map(rank).collect(), PyTorchNeeds::OneGpu).unwrap()
    }

    fn reason<T>(result: Result<T, CliError>) -> String {
        result.err().unwrap().to_string()
    }

    #[test]
    fn ranks_run_their_commands_and_the_slowest_counts() {
        let script = r#"while read line; do case "$line" in *case*) echo "[\"one\", \"two\"]";; *:1*) echo "[2.$RANK, 0.$RANK]";; *) echo [1, 1];; esac; done"#;
        let mut ranks = ranks(script, 3);
        let ways = ranks.prepare::<String>(&json!({ "mask": "full" })).unwrap();
        assert_eq!(ways, ["one", "two"]);
        assert_eq!([0, 1].map(|variant| ranks.run(variant, 0.25).unwrap()), [[1.0, 1.0], [2.2, 0.2]]);
    }

    #[test]
    fn whoever_fails_is_no_endless_wait() {
        let mut lacking = ranks("exit 3", 2);
        assert!(reason(lacking.prepare::<String>(&1)).contains("no PyTorch that sees a GPU"));
        let mut one_fails = ranks("read line; test $RANK = 0 && sleep 60; exit 4", 2);
        let began = Instant::now();
        assert!(reason(one_fails.prepare::<String>(&1)).contains('4'));
        let mut unlike = ranks(r#"read line; test $RANK = 0 && echo [1] || echo []; sleep 60"#, 2);
        assert!(reason(unlike.prepare::<u32>(&1)).contains("[1, 0]"));
        let mut odd = ranks("read line; echo what; sleep 60", 1);
        assert!(reason(odd.prepare::<String>(&1)).contains("what"));
        let mut silent = InterleavedRanks { limit: Duration::from_millis(100), ..ranks("sleep 60", 1) };
        assert!(reason(silent.prepare::<String>(&1)).contains("no answer"));
        assert!(began.elapsed() < Duration::from_secs(20));
    }

    /// As much of PyTorch as interleaving needs, in place of a GPU's.
    const TORCH: &str = "import time
class cuda:
    class Event:
        def __init__(self, enable_timing): pass
        def record(self): self.at = time.perf_counter()
        def elapsed_time(self, other): return 1e3 * (other.at - self.at)
    empty_cache = synchronize = staticmethod(lambda: None)
    _sleep = staticmethod(lambda cycles: time.sleep(cycles / 1.9e9))
";
    const DISTRIBUTED: &str = "barrier = lambda: None\nget_rank = lambda: 0\nis_initialized = lambda: True\n";
    /// A script with two ways, and one that errs, and one that cannot.
    const SCRIPT: &str = "import time
from common.interleaved import Way, ready, serve
def sleeping(seconds, error):
    yield Way(lambda: time.sleep(seconds), by=f'{seconds} s', error_over_bound=error)
def broken():
    raise RuntimeError('no such operator')
    yield
def ways_of(longest):
    print('not an answer')
    for name, prepare in [('short', lambda: sleeping(0.001, 0.5)), ('wrong', lambda: sleeping(0.002, 1.5)),
                          ('broken', broken), ('long', lambda: sleeping(longest, 1.0))]:
        yield from ready(prepare, peer=name)
serve(ways_of)
";

    #[test]
    fn scripts_are_interleaved_by_commands() {
        let script = Script::unpack("tensor_parallel.py").unwrap();
        let (peers, torch) = (script.peers(), script.peers().join("torch"));
        std::fs::create_dir(&torch).unwrap();
        for (path, text) in [
            (torch.join("__init__.py"), TORCH),
            (torch.join("distributed.py"), DISTRIBUTED),
            (peers.join("interleaved.py"), SCRIPT),
        ] {
            std::fs::write(path, text).unwrap();
        }
        let rank = || {
            let mut command = Command::new("python3");
            command.arg("-B").arg(peers.join("interleaved.py"));
            command
        };
        let mut ranks = InterleavedRanks::start(script, vec![rank(), rank()], PyTorchNeeds::OneGpu).unwrap();
        for longest in [0.02, 0.03] {
            let ways: Vec<serde_json::Value> = ranks.prepare(&json!({ "longest": longest })).unwrap();
            let names: Vec<_> = ways.iter().map(|way| way["by"].as_str().unwrap().to_owned()).collect();
            assert_eq!(names, ["0.001 s".to_owned(), format!("{longest} s")]);
            let [seconds, enqueued] = ranks.run(1, 0.05).unwrap();
            assert!(seconds >= longest && seconds < longest + 0.05, "{seconds}");
            assert!(enqueued >= longest + 0.05, "{enqueued}");
        }
        ranks.part();
    }
}
