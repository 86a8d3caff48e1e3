//! What a command is doing, on standard error.

use std::time::{Duration, Instant};

use counterpoint_report::printable;
use indicatif::{ProgressBar, ProgressStyle};

use crate::console;

/// What is being done, with the time it has taken, on stderr and only where that is a terminal. Cleared when dropped.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress {
    /// Nothing is shown until the first step.
    pub fn new() -> Self {
        // Where stderr is no terminal the bar draws nothing.
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Says what begins now.
    pub fn step(&self, what: impl Into<String>) {
        self.bar.set_message(printable(&what.into()).into_owned());
        self.bar.reset_elapsed();
        // A thread draws it, which nobody needs where nothing is drawn.
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(Duration::from_millis(100));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// How many of a known number of things are done, on stderr and only where that is a terminal. Cleared when dropped.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
}

impl Default for Bar {
    fn default() -> Self {
        Self::new()
    }
}

impl Bar {
    /// Nothing is shown until the first step.
    pub fn new() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos} of {len}, {msg} ({eta} left)") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Says what begins now, after `done` of `all` things.
    pub fn show(&self, what: &str, done: usize, all: usize) {
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
        self.bar.set_message(printable(what).into_owned());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Between two lines of a [`Ticker`] where standard error is not a terminal.
const EVERY: Duration = Duration::from_secs(5);
/// Between two looks of one that is a terminal.
const REDRAWN: Duration = Duration::from_millis(200);

/// How far something is that takes minutes, on stderr: a line that is drawn again where that is a terminal, else a line every few
/// seconds, so that a log shows it too. Cleared when dropped.
#[derive(Debug)]
pub struct Ticker {
    bar: ProgressBar,
    name: &'static str,
    began: Instant,
    reported: Instant,
}

impl Ticker {
    /// Of what has this name. Nothing is shown until something is said.
    pub fn new(name: &'static str) -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix}: {wide_msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_prefix(name);
        Self { bar, name, began: Instant::now(), reported: Instant::now() }
    }

    /// Says how far it is, if it is time to.
    pub fn report(&mut self, text: impl FnOnce() -> String) {
        let drawn = !self.bar.is_hidden();
        if self.reported.elapsed() < if drawn { REDRAWN } else { EVERY } {
            return;
        }
        self.reported = Instant::now();
        if drawn {
            self.bar.set_message(text());
            self.bar.tick();
        } else {
            console::note(&format!("{}, {} s: {}", self.name, self.began.elapsed().as_secs(), text()));
        }
    }

    /// Lets something be printed that the line would be in the way of.
    pub fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
