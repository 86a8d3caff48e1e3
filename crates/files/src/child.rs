//! Another program, run to its end.

use std::io::{self, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

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
    let status = wait(&mut child, limit)?;
    let (stdout, stderr) = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
    if status.success() {
        return Ok(stdout);
    }
    let words = String::from_utf8_lossy(&stderr);
    Err(ChildError::Failed { status, words: words.trim().lines().next_back().map(str::to_owned) })
}

fn wait(child: &mut std::process::Child, limit: Duration) -> Result<ExitStatus, ChildError> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(500);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if start.elapsed() < limit => thread::sleep(pause),
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

fn read(pipe: Option<impl Read + Send + 'static>) -> io::Result<thread::JoinHandle<Vec<u8>>> {
    thread::Builder::new().name("pipe".to_owned()).spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is what there is.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<Vec<u8>, ChildError> {
        output_of(Command::new("sh").args(["-c", script]), limit)
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
