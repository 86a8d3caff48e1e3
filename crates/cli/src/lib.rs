//! The `counterpoint` command: arguments, printing, exit status. Its binary, and the Python package's script of the same name, run it.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod allocator;
mod arguments;
mod command;
mod nccl;

use std::ffi::OsString;
use std::iter;
use std::time::Duration;

use clap::FromArgMatches;
use counterpoint_console::{self as console, CommandLine, interrupt, program};

pub use allocator::ReportingAllocator;
use arguments::Arguments;

pub use nccl::decide_before_threads;

/// Does what the arguments of this program ask for, and ends the process with its status. Panics, signals and memory that runs out are
/// this program's from now on. The calling thread is named `main`.
pub fn run() -> ! {
    // Before there are threads.
    allocator::prepare_for_an_address_limit();
    allocator::report_failures();
    decide_before_threads();
    interrupt::install();
    report_panics_in_one_line();
    let accepted = arguments::command();
    let parsed = accepted.clone().try_get_matches_from(words()).and_then(|matches| {
        let arguments = Arguments::from_arg_matches(&matches)?;
        Ok((arguments, CommandLine::of(&accepted, &matches)))
    });
    let result = match parsed {
        Ok((arguments, line)) => command::run(arguments.command, &line),
        Err(error) if error.use_stderr() => Err(arguments::usage_error(&error)),
        Err(help) => console::print(&arguments::help_text(&help)),
    };
    interrupt::stay_if_ending();
    console::note_cache_warnings();
    match result {
        Ok(()) => counterpoint_cuda::end_process(0),
        Err(error) => {
            console::note_error(&error);
            counterpoint_cuda::end_process(error.exit_status())
        }
    }
}

/// The command line with the program's name.
fn words() -> impl Iterator<Item = OsString> {
    iter::once(OsString::from("counterpoint")).chain(program::arguments())
}

/// Exit status where the machine lacks what is needed.
const THREADS_REFUSED: i32 = 3;

/// A panic is a bug of ours, printed in one line. One of a rank's threads reaches the user as that run's error.
///
/// The language's own way to start a thread, which libraries take, panics where the system refuses one: in the thread that asks, or in
/// the new one before anything could catch it, where the memory for its signals is refused. Neither is a bug.
fn report_panics_in_one_line() {
    std::panic::set_hook(Box::new(|panic| {
        let on_main = std::thread::current().name() == Some("main");
        let message = panic.payload_as_str().unwrap_or_default();
        if message.contains("alternative stack") || on_main && message.contains("failed to spawn thread") {
            let why = "error: the system gives no more threads; raise `ulimit -u` or `ulimit -v`\n";
            interrupt::end_soon(why, THREADS_REFUSED, Duration::from_secs(1));
        }
        if on_main {
            let message = panic.to_string().replace('\n', " ");
            console::note(&format!("error: this is a bug in counterpoint, please report it: {message}"));
        }
    }));
}
