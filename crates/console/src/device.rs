//! The processor of this machine, by name and threads.

use std::fs;
use std::thread;

use crate::console;

/// The processor by the name that the system gives it, and how many of its threads this process may use.
pub fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']));
    format!("{} ({})", model.unwrap_or("CPU"), console::count(cpu_threads(), "thread"))
}

/// Threads that this process may run at once.
pub fn cpu_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
