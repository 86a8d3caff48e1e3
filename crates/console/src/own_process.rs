//! Processes of ours, none of which outlives us.

use std::io::{self, Read};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{mem, thread};

use crate::interrupt::Cleanup;

/// Between two looks at whether one has ended.
const LOOK: Duration = Duration::from_millis(10);
/// A process that is asked to end has so long for the processes that it has started itself, and their files.
const GRACE: Duration = Duration::from_secs(2);

/// A process that ends when this goes, or when we are interrupted. It is killed; where its standard input is a pipe that was not taken
/// ([`OwnProcess::stdin`]), that is closed first, and it is killed unless it ends by itself then.
#[derive(Debug)]
pub struct OwnProcess {
    child: Arc<Mutex<Child>>,
    _cleanup: Cleanup,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a process that still runs, and waits for it.
fn end(child: &mut Child) {
    let asked = Instant::now();
    let grace = if child.stdin.take().is_some() { GRACE } else { Duration::ZERO };
    while matches!(child.try_wait(), Ok(None)) {
        if asked.elapsed() < grace {
            thread::sleep(LOOK);
            continue;
        }
        // One that ends by itself meanwhile has nothing to be killed.
        child.kill().ok();
        child.wait().ok();
    }
}

impl OwnProcess {
    /// Starts it. An interruption meanwhile waits until it has started, and ends it: it is known to the cleanup before it is there.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let started: Arc<Mutex<Option<Arc<Mutex<Child>>>>> = Arc::default();
        let of_cleanup = Arc::clone(&started);
        let clean = move || {
            let started = locked(&of_cleanup);
            if let Some(child) = &*started {
                let mut child = locked(child);
                end(&mut child);
                // Who waits for it waits on, until we have ended: nobody is to hear that it failed.
                mem::forget(child);
            }
            // And none is started any more.
            mem::forget(started);
        };
        let cleanup = Cleanup::new(clean);
        let mut started = locked(&started);
        let child = Arc::new(Mutex::new(command.spawn()?));
        *started = Some(Arc::clone(&child));
        Ok(Self { child, _cleanup: cleanup })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        locked(&self.child).id()
    }

    /// Its standard input, where that is a pipe and nobody has it yet.
    pub fn stdin(&self) -> Option<ChildStdin> {
        locked(&self.child).stdin.take()
    }

    /// Its standard output, likewise.
    pub fn stdout(&self) -> Option<ChildStdout> {
        locked(&self.child).stdout.take()
    }

    /// How it ended; `None` while it runs.
    pub fn status(&self) -> io::Result<Option<ExitStatus>> {
        locked(&self.child).try_wait()
    }

    /// Waits for its end: how it ended, and what it has written to its standard output, where that is a pipe.
    pub fn output(&self) -> io::Result<(ExitStatus, Vec<u8>)> {
        let mut said = Vec::new();
        if let Some(mut stdout) = self.stdout() {
            stdout.read_to_end(&mut said)?;
        }
        loop {
            // Not a wait, during which nobody else could kill it.
            if let Some(status) = self.status()? {
                return Ok((status, said));
            }
            thread::sleep(LOOK);
        }
    }

    /// Whether it runs, as far as can be known.
    pub fn runs(&self) -> bool {
        matches!(self.status(), Ok(None))
    }

    /// Kills it, if it still runs.
    pub fn end(&self) {
        end(&mut locked(&self.child));
    }
}

impl Drop for OwnProcess {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn it_ends_with_its_owner() {
        let process = OwnProcess::start(Command::new("sleep").arg("60")).unwrap();
        let entry = format!("/proc/{}", process.id());
        assert!(process.runs() && Path::new(&entry).exists());
        drop(process);
        assert!(!Path::new(&entry).exists());
    }

    #[test]
    fn it_ends_what_it_has_started_when_its_input_closes() {
        let folder = tempfile::tempdir().unwrap();
        let ended = folder.path().join("ended");
        let mut command = Command::new("sh");
        command.args(["-c", "cat > /dev/null; echo > \"$0\""]).arg(&ended).stdin(Stdio::piped());
        drop(OwnProcess::start(&mut command).unwrap());
        assert!(ended.exists(), "it was killed before it could end by itself");

        let mut deaf = Command::new("sleep");
        let process = OwnProcess::start(deaf.arg("60").stdin(Stdio::piped())).unwrap();
        let entry = format!("/proc/{}", process.id());
        drop(process);
        assert!(!Path::new(&entry).exists());
    }

    #[test]
    fn what_it_says_is_heard_to_the_end() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; sleep 0.1; echo two; exit 3"]).stdout(Stdio::piped());
        let (status, said) = OwnProcess::start(&mut command).unwrap().output().unwrap();
        assert_eq!((status.code(), &*said), (Some(3), &b"one\ntwo\n"[..]));
    }
}
