//! Another program, run to its end.

use std::io::{self, ErrorKind, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

/// What a program that has ended leaves in a pipe is read within this. Longer than that the pipe is open where a process of the program's own
/// outlives it and has it too: that one is not waited for.
const LEFT_OPEN: Duration = Duration::from_secs(1);

/// Why another program gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChildError {
    /// It cannot be started, or not be waited for.
    #[error("{text}")]
    System {
        /// The system's words.
        text: String,
    },
    /// Nothing can read what it says.
    #[error("the system gives no thread that could read what it says")]
    NoThread,
    /// It did not end in time.
    #[error("no answer within {} s", limit.as_secs_f64())]
    NoAnswer {
        /// The time that it had.
        limit: Duration,
    },
    /// It ended with a status of failure.
    #[error("it ended with {status}: {}", words.as_deref().unwrap_or("no word of why"))]
    Failed {
        /// The status.
        status: ExitStatus,
        /// The last line that it wrote to standard error.
        words: Option<String>,
    },
}

impl ChildError {
    fn system(error: io::Error) -> Self {
        Self::System { text: error.to_string() }
    }
}

/// Runs a program to its end, `limit` at most, and gives what it wrote to standard output.
///
/// # Errors
/// When it cannot be started, does not end in time, or ends with a status of failure.
pub fn output_of(command: &mut Command, limit: Duration) -> Result<Vec<u8>, ChildError> {
    let began = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(ChildError::system)?;
    // Both pipes are emptied while it runs: a full one would stop it.
    let reading = [read(child.stdout.take()), read(child.stderr.take())];
    let [Ok(stdout), Ok(stderr)] = reading else {
        let _ = child.kill();
        let _ = child.wait();
        return Err(ChildError::NoThread);
    };
    let status = wait(&mut child, began, limit)?;
    let [stdout, stderr] = [stdout, stderr].map(|pipe| read_by_now(&pipe, began, limit));
    if status.success() {
        return Ok(stdout);
    }
    let words = String::from_utf8_lossy(&stderr);
    Err(ChildError::Failed { status, words: words.trim().lines().next_back().map(str::to_owned) })
}

fn wait(child: &mut std::process::Child, began: Instant, limit: Duration) -> Result<ExitStatus, ChildError> {
    let mut pause = Duration::from_micros(500);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if began.elapsed() < limit => thread::sleep(pause),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(ChildError::NoAnswer { limit });
            }
            Err(error) => return Err(ChildError::system(error)),
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Has a thread read a pipe to its end, piece by piece.
fn read(pipe: Option<impl Read + Send + 'static>) -> io::Result<Receiver<Vec<u8>>> {
    let (send, pieces) = mpsc::channel();
    thread::Builder::new().name("pipe".to_owned()).spawn(move || {
        let Some(mut pipe) = pipe else { return };
        let mut piece = vec![0; 1 << 16];
        loop {
            match pipe.read(&mut piece) {
                Ok(read) if read > 0 && send.send(piece[..read].to_vec()).is_ok() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // What was read before an error is what there is.
                _ => return,
            }
        }
    })?;
    Ok(pieces)
}

/// What has come of a pipe whose program has ended.
fn read_by_now(pieces: &Receiver<Vec<u8>>, began: Instant, limit: Duration) -> Vec<u8> {
    let (ended, left) = (Instant::now(), limit.saturating_sub(began.elapsed()).max(LEFT_OPEN));
    let mut bytes = Vec::new();
    while ended.elapsed() < left
        && let Ok(piece) = pieces.recv_timeout(LEFT_OPEN)
    {
        bytes.extend_from_slice(&piece);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<Vec<u8>, ChildError> {
        output_of(Command::new("sh").args(["-c", script]), limit)
    }

    /// A wrapper that starts something in the background leaves it the pipes.
    #[test]
    fn a_process_that_outlives_the_program_is_not_waited_for() {
        let began = Instant::now();
        assert_eq!(shell("sleep 30 & echo yes", Duration::from_secs(60)).unwrap(), b"yes\n");
        let failed =
            shell("sleep 30 & echo no >&2; exit 3", Duration::from_secs(60)).unwrap_err().to_string();
        assert!(failed.ends_with(": no"), "{failed}");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }

    #[test]
    fn answers_failures_and_silence() {
        let patient = Duration::from_secs(60);
        assert_eq!(shell("echo yes", patient).unwrap(), b"yes\n");
        // More than a pipe holds.
        assert_eq!(
            shell("head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2", patient).unwrap().len(),
            1_000_000
        );
        let failed =
            shell("echo first >&2; echo no such thing >&2; exit 3", patient).unwrap_err().to_string();
        assert!(failed.contains('3') && failed.ends_with(": no such thing"), "{failed}");
        let silent = shell("exec sleep 60", Duration::from_millis(50)).unwrap_err();
        assert_eq!(silent.to_string(), "no answer within 0.05 s");
        assert!(output_of(&mut Command::new("/nowhere/program"), patient).is_err());
    }
}
