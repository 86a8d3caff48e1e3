//! Comparisons with PyTorch: scripts of ours in the machine's own `python3`.

mod script;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

pub(super) use script::Script;
#[cfg(test)]
pub(super) use script::text_of;

use crate::error::CliError;
use crate::own_process::OwnProcess;

/// No comparison takes as long. One that does has hung, in a driver or a collective.
const LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs all `commands` at once, which are those of one [`Script`]. Whichever fails ends the others. `lacks` says what a machine has
/// not on which the script ends with status 3.
pub(super) fn run_all(commands: Vec<Command>, lacks: &str) -> Result<(), CliError> {
    run(commands, lacks, None)
}

/// The same, where `heard` is given every line that the first of them prints.
pub(super) fn run_all_heard(
    mut commands: Vec<Command>,
    lacks: &str,
    mut heard: impl FnMut(&str) -> Result<(), CliError>,
) -> Result<(), CliError> {
    if let Some(first) = commands.first_mut() {
        first.stdout(Stdio::piped());
    }
    run(commands, lacks, Some(&mut heard))
}

type Heard<'a> = Option<&'a mut dyn FnMut(&str) -> Result<(), CliError>>;

fn run(commands: Vec<Command>, lacks: &str, mut heard: Heard<'_>) -> Result<(), CliError> {
    let no_peers = |reason: String| CliError::NoPeers { reason };
    let mut processes = Vec::new();
    let mut lines = Vec::new();
    for mut command in commands {
        let started = OwnProcess::start(command.stdin(Stdio::null()));
        let process = started.map_err(|error| no_peers(format!("python3 cannot be started ({error})")))?;
        lines.extend(process.stdout().map(read_lines));
        processes.push(process);
    }
    let began = Instant::now();
    loop {
        hear(&lines, &mut heard)?;
        let mut running = 0;
        for process in &processes {
            match process
                .status()
                .map_err(|error| no_peers(format!("python3 cannot be waited for ({error})")))?
            {
                None => running += 1,
                Some(status) if status.success() => {}
                Some(status) if status.code() == Some(3) => return Err(no_peers(lacks.to_owned())),
                Some(status) => {
                    let what = format!("the comparison with PyTorch ended with {status}");
                    return Err(CliError::CheckFailed { what });
                }
            }
        }
        if running == 0 {
            // What they printed last; the reader ends with them.
            return lines.iter().flat_map(Receiver::iter).try_for_each(|line| tell(&line, &mut heard));
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

fn hear(lines: &[Receiver<String>], heard: &mut Heard<'_>) -> Result<(), CliError> {
    lines.iter().flat_map(Receiver::try_iter).try_for_each(|line| tell(&line, heard))
}

fn tell(line: &str, heard: &mut Heard<'_>) -> Result<(), CliError> {
    heard.as_mut().map_or(Ok(()), |heard| heard(line))
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
    fn all_are_waited_for_and_the_first_to_fail_ends_the_others() {
        assert!(run_all(vec![shell("true"), shell("sleep 0.2")], "").is_ok());
        let began = Instant::now();
        let error = run_all(vec![shell("sleep 60"), shell("exit 4")], "").unwrap_err();
        assert!(error.to_string().contains('4'), "{error}");
        let error = run_all(vec![shell("exit 3"), shell("sleep 60")], "no such GPU").unwrap_err();
        assert!(error.to_string().contains("no such GPU"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn lines_of_the_first_are_heard() {
        let mut lines = Vec::new();
        let heard = |line: &str| {
            lines.push(line.to_owned());
            Ok(())
        };
        let commands = vec![shell("echo one; sleep 0.2; echo two"), shell("sleep 0.1")];
        run_all_heard(commands, "", heard).unwrap();
        assert_eq!(lines, ["one", "two"]);
    }
}
