//! Ctrl-C and termination: the process ends at once with status 130, all ranks with it, as they are its threads. Three things must
//! not be left behind: half of an output file, temporary folders, and processes of ours.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

static WRITING: Mutex<()> = Mutex::new(());
static CLEANUPS: Mutex<Cleanups> = Mutex::new(Cleanups { ending: false, next: 0, waiting: Vec::new() });

/// Exit status of a process that was interrupted: 128 and the number of SIGINT.
const INTERRUPTED: i32 = 130;

/// Has a thread wait for signals. Where the system refuses one, its own handling stays in place, which ends the process too.
pub fn install() {
    // Handled, the write fails like one to a full disk: the error is printed, and what was half written is removed. Children get the
    // system's own handling back, which they would not of a signal that is ignored.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else { return };
    let wait = move || {
        if signals.forever().next().is_some() {
            end(INTERRUPTED);
        }
    };
    // Without a thread nothing would hear them, but then no rank could be started either.
    let _ = thread::Builder::new().name("signals".to_owned()).spawn(wait);
}

/// Ends the process wherever its other threads are, and leaves nothing behind.
pub fn end(status: i32) -> ! {
    let _not_while_writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let waiting = begin_to_end(&mut cleanups());
    clean(waiting);
    // Without the handlers of a normal end: libraries would tear down what other threads are still using.
    signal_hook::low_level::exit(status)
}

/// As [`end`], saying `why`, from a thread that may itself be writing a file or making a cleanup: it waits for others that are,
/// `patience` at most. Several threads may run into the same lack; the first says so. Takes no memory until it has.
pub fn end_soon(why: &str, status: i32, patience: Duration) -> ! {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        let _ = io::stderr().write_all(why.as_bytes());
    }
    let _not_while_writing = soon(&WRITING, patience);
    let waiting = soon(&CLEANUPS, patience).map(|mut cleanups| begin_to_end(&mut cleanups));
    clean(waiting.unwrap_or_default());
    signal_hook::low_level::exit(status)
}

/// What is to be done; what comes later does itself at once.
fn begin_to_end(cleanups: &mut Cleanups) -> Vec<(u64, Clean)> {
    cleanups.ending = true;
    std::mem::take(&mut cleanups.waiting)
}

/// The newest first: processes before the folder that they write into.
fn clean(waiting: Vec<(u64, Clean)>) {
    waiting.into_iter().rev().for_each(|(_, clean)| clean());
}

fn soon<T>(mutex: &Mutex<T>, patience: Duration) -> Option<MutexGuard<'_, T>> {
    let began = Instant::now();
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(guard)) => return Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) if began.elapsed() < patience => {
                thread::sleep(Duration::from_millis(5))
            }
            Err(TryLockError::WouldBlock) => return None,
        }
    }
}

/// Keeps the calling thread where it is if the process is being ended: what it has found since is that ends went missing.
pub fn stay_if_ending() {
    while cleanups().ending {
        thread::park();
    }
}

/// Runs `write`; an interruption takes effect after it.
pub fn not_during<T>(write: impl FnOnce() -> T) -> T {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    write()
}

/// What an interruption does first. Dropping it takes it back.
#[derive(Debug)]
pub struct Cleanup(u64);

struct Cleanups {
    ending: bool,
    next: u64,
    waiting: Vec<(u64, Clean)>,
}

type Clean = Box<dyn FnOnce() + Send>;

fn cleanups() -> MutexGuard<'static, Cleanups> {
    CLEANUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cleanup {
    /// Has an interruption run `clean`.
    pub fn new(clean: impl FnOnce() + Send + 'static) -> Self {
        let mut cleanups = cleanups();
        if cleanups.ending {
            // Too late for the list.
            drop(cleanups);
            clean();
            return Self(u64::MAX);
        }
        cleanups.next += 1;
        let number = cleanups.next;
        cleanups.waiting.push((number, Box::new(clean)));
        Self(number)
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        cleanups().waiting.retain(|(number, _)| *number != self.0);
    }
}
