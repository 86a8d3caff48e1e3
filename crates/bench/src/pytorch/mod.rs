//! Comparisons with PyTorch: scripts of ours in the machine's own `python3`.

mod interleaved_ranks;
mod peers;
mod script;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{ChildStdout, Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use counterpoint_console::{CliError, PeersFault, PyTorchFault};

pub(super) use interleaved_ranks::InterleavedRanks;
pub(super) use peers::{PeerVariant, Peers, TIMED, WARM_UP};
pub(super) use script::{Script, peer_folder};
#[cfg(test)]
pub(super) use script::{assert_strings, text_of};

/// Between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(50);

/// What a script of PyTorch's needs of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PyTorchNeeds {
    /// Any GPU.
    OneGpu,
    /// So many, a rank on each.
    Gpus(usize),
}

impl PyTorchNeeds {
    /// What is missing on a machine that does not have it.
    fn missing(self) -> PeersFault {
        match self {
            Self::OneGpu => PeersFault::NoGpu,
            Self::Gpus(gpus) => PeersFault::FewGpus { gpus },
        }
    }
}

fn ended_badly(status: ExitStatus, needs: PyTorchNeeds) -> CliError {
    match status.code() {
        Some(3) => CliError::no_peers(needs.missing()),
        _ => CliError::check(PyTorchFault::Ended(status)),
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
    let no_port = |error: std::io::Error| CliError::no_peers(PeersFault::NoPort(error));
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
