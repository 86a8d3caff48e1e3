//! How far a test is that takes minutes, a line every few seconds.

use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};

/// Lines on a stream, at most one in an interval.
#[derive(Debug)]
pub(crate) struct LiveLine<W> {
    stream: W,
    every: Duration,
    last: Instant,
}

impl<W: Write> LiveLine<W> {
    /// Shows nothing before one interval has passed.
    pub(crate) fn new(stream: W, every: Duration) -> Self {
        Self { stream, every, last: Instant::now() }
    }

    /// Shows `line` where the last one is old enough.
    pub(crate) fn show(&mut self, line: fmt::Arguments<'_>) {
        if self.last.elapsed() >= self.every {
            self.last = Instant::now();
            // Not by a macro, whose lines the test's harness would keep to itself.
            let _ = writeln!(self.stream, "{line}");
        }
    }
}

#[test]
fn lines_are_an_interval_apart() {
    let mut shown = Vec::new();
    let mut line = LiveLine::new(&mut shown, Duration::from_secs(3600));
    line.show(format_args!("too early"));
    line.every = Duration::ZERO;
    line.show(format_args!("first"));
    line.every = Duration::from_secs(3600);
    line.show(format_args!("too early again"));
    assert_eq!(String::from_utf8(shown).unwrap(), "first\n");
}
