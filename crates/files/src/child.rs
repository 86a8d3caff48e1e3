//! Another program, run to its end.

use std::io::{self, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Runs a program to its end, `limit` at most, and gives what it wrote to standard output. An error names what went wrong, with
/// the program's own words where it had some.
///
/// # Errors
/// When it cannot be started, does not end in time, or ends with a status of failure.
pub fn output_of(command: &mut Command, limit: Duration) -> Result<Vec<u8>, String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    // Both pipes are emptied while it runs: a full one would stop it.
    let reading = [read(child.stdout.take()), read(child.stderr.take())];
    let [Ok(stdout), Ok(stderr)] = reading else {
        let _ = child.kill();
        let _ = child.wait();
        return Err("the system gives no thread that could read what it says".to_owned());
    };
    let status = wait(&mut child, limit)?;
    let (stdout, stderr) = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
    if status.success() {
        return Ok(stdout);
    }
    let words = String::from_utf8_lossy(&stderr);
    Err(format!("it ended with {status}: {}", words.trim().lines().next_back().unwrap_or("no word of why")))
}

fn wait(child: &mut std::process::Child, limit: Duration) -> Result<ExitStatus, String> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(500);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if start.elapsed() < limit => thread::sleep(pause),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer within {} s", limit.as_secs_f64()));
            }
            Err(error) => return Err(error.to_string()),
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

    fn shell(script: &str, limit: Duration) -> Result<Vec<u8>, String> {
        output_of(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn answers_failures_and_silence() {
        let patient = Duration::from_secs(60);
        assert_eq!(shell("echo yes", patient), Ok(b"yes\n".to_vec()));
        // More than a pipe holds.
        assert_eq!(
            shell("head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2", patient).unwrap().len(),
            1_000_000
        );
        let failed = shell("echo first >&2; echo no such thing >&2; exit 3", patient).unwrap_err();
        assert!(failed.contains('3') && failed.ends_with(": no such thing"), "{failed}");
        assert_eq!(shell("exec sleep 60", Duration::from_millis(50)).unwrap_err(), "no answer within 0.05 s");
        assert!(output_of(&mut Command::new("/nowhere/program"), patient).is_err());
    }
}
