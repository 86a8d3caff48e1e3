use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// What is being done, with the time it has taken, on stderr and only where that is a terminal. Cleared when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Nothing is shown until the first step.
    pub(crate) fn new() -> Self {
        // Where stderr is no terminal the bar draws nothing.
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Says what begins now.
    pub(crate) fn step(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
        self.bar.reset_elapsed();
        self.bar.enable_steady_tick(Duration::from_millis(100));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// How many of a known number of things are done, on stderr and only where that is a terminal. Cleared when dropped.
#[derive(Debug)]
pub(crate) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// Nothing is shown until the first step.
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos} of {len}, {msg} ({eta} left)") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Says what begins now, after `done` of `all` things.
    pub(crate) fn show(&self, what: &str, done: usize, all: usize) {
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
        self.bar.set_message(what.to_owned());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
