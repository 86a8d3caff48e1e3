//! Comparisons with PyTorch: scripts of ours in the machine's own `python3`.

mod peers;
mod script;
mod turn_taking;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_console::{CliError, OwnProcess};

pub(super) use peers::{PeerWay, Peers};
pub(super) use script::Script;
#[cfg(test)]
pub(super) use script::{assert_strings, text_of};
pub(super) use turn_taking::TurnTaking;

/// No comparison takes as long. One that does has hung, in a driver or a collective.
const LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs `command`, which is that of a [`Script`], to its end. `lacks` says what a machine has not on which the script ends with status 3.
pub(super) fn run(mut command: Command, lacks: &str) -> Result<(), CliError> {
    let no_peers = |reason: String| CliError::NoPeers { reason };
    let started = OwnProcess::start(command.stdin(Stdio::null()));
    let process = started.map_err(|error| no_peers(format!("python3 cannot be started ({error})")))?;
    let began = Instant::now();
    loop {
        let status = process.status();
        match status.map_err(|error| no_peers(format!("python3 cannot be waited for ({error})")))? {
            None => {}
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(ended_badly(status, lacks)),
        }
        if began.elapsed() > LIMIT {
            let minutes = LIMIT.as_secs() / 60;
            let what = format!(
                "the comparison with PyTorch did not end in {minutes} minutes; ask for fewer masks or sizes"
            );
            return Err(CliError::CheckFailed { what });
        }
        thread::sleep(PAUSE);
    }
}

fn ended_badly(status: ExitStatus, lacks: &str) -> CliError {
    match status.code() {
        Some(3) => CliError::NoPeers { reason: lacks.to_owned() },
        _ => CliError::CheckFailed { what: format!("the comparison with PyTorch ended with {status}") },
    }
}

/// Lines as they are printed, by a thread that ends with the process.
fn read_lines(stdout: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        // Nobody listens any more once another process has failed.
        BufReader::new(stdout)
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line).map_err(drop))
    });
    receiver
}

/// A process for each of `ranks` GPUs, which find each other as PyTorch's `env://` wants it; `command` makes one of them.
pub(super) fn on_gpus(ranks: usize, command: impl Fn() -> Command) -> Result<Vec<Command>, CliError> {
    // One that was free a moment ago.
    let free_port = || TcpListener::bind(("127.0.0.1", 0))?.local_addr().map(|address| address.port());
    let no_port = |error: std::io::Error| CliError::NoPeers { reason: format!("no free port ({error})") };
    let port = free_port().map_err(no_port)?;
    let process = |rank: usize| {
        let mut command = command();
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command
    };
    Ok((0..ranks).map(process).collect())
}

/// What a machine lacks that has fewer GPUs.
pub(super) fn lacks_gpus(ranks: usize) -> String {
    format!("python3 has no PyTorch that sees {ranks} GPUs")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        command
    }

    #[test]
    fn it_is_waited_for_and_what_it_lacks_is_said() {
        assert!(run(shell("sleep 0.2"), "").is_ok());
        let error = run(shell("exit 4"), "").unwrap_err();
        assert!(error.to_string().contains('4'), "{error}");
        let error = run(shell("exit 3"), "no such GPU").unwrap_err();
        assert!(error.to_string().contains("no such GPU"), "{error}");
    }
}
