//! Standard output, and notes on standard error.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use counterpoint_cuda::CubinCache;
pub use counterpoint_report::format_counted as count;
use counterpoint_report::{Style, printable, printable_json, printable_lines};
use serde::Serialize;

use crate::error::CliError;
use crate::schema::{Documented, Schema};

/// Prints `text` to standard output. A reader that has gone away (`| head`) has what it wanted. A standard output that was
/// closed from the start (`>&-`) is not seen here: the standard library has opened `/dev/null` in its place.
/// Whatever the text has from files, arguments and other ranks commands no terminal.
pub fn print(text: &str) -> Result<(), CliError> {
    write(&printable_lines(text, style().color))
}

fn write(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => Err(CliError::Stdout { source }),
        _ => Ok(()),
    }
}

/// Prints `text` with lines that fit the terminal, broken between words.
pub fn print_folded(text: &str) -> Result<(), CliError> {
    print(&counterpoint_report::fold(text, &style()))
}

/// Prints one JSON document, an object, on one line, its schema in front.
pub fn print_json(schema: Schema, document: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string(&Documented { schema, document })
        .map_err(|error| CliError::Stdout { source: error.into() })?;
    write(&printable_json(&(text + "\n")))
}

/// Prints one line to standard error, in which nothing commands a terminal. Nobody may be there to read it, which is no reason to stop.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", printable(text));
}

/// Prints an error: one line, and where a compiler's own words belong to it those behind, further right.
pub fn note_error(error: &CliError) {
    let text = format!("error: {error}");
    match error {
        CliError::Cuda { .. } | CliError::Run { .. } => {
            let lines: Vec<_> = text.trim_end().lines().map(printable).collect();
            let _ = writeln!(io::stderr().lock(), "{}", lines.join("\n  "));
        }
        _ => note(&text),
    }
}

/// Says what kept the cache of compiled kernels from being used: a few of them, and how many more there are.
pub fn note_cache_warnings() {
    let warnings = CubinCache::of_process().take_warnings();
    for warning in warnings.iter().take(MOST_WARNINGS) {
        note(&format!("note: {warning}"));
    }
    if warnings.len() > MOST_WARNINGS {
        note(&format!("note: {} more of the kernel cache", count(warnings.len() - MOST_WARNINGS, "warning")));
    }
}

/// That are printed in full.
const MOST_WARNINGS: usize = 3;

/// Says that a pipe with a name waits until something `does` what it must at its other end, where `path` is one: nothing
/// else would say why the program does not go on. The pipes of a shell have no names and their other end already.
pub fn note_waiting(path: &Path, does: &str) {
    let is_fifo = path.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo());
    if is_fifo && path.canonicalize().is_ok() {
        note(&format!("note: {} is a pipe; waiting until something {does}", path.display()));
    }
}

/// The stages of a pass: the local work, and what is left of the others'.
pub fn stages(count_with_local: usize) -> String {
    match count_with_local {
        0 | 1 => "local work only".to_owned(),
        more => format!("local work and {}", count(more - 1, "stage")),
    }
}

/// Says that timings are not those of a release build, where they are not.
pub fn note_development_build() {
    if cfg!(debug_assertions) {
        note("note: this is a development build with its checks; time a build with --release");
    }
}

/// How tables on standard output are drawn: coloured on a terminal unless `NO_COLOR` is set, as wide as the terminal, or as `COLUMNS`
/// says where there is none.
pub fn style() -> Style {
    let asked = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let asked = asked.filter(|columns: &u16| *columns > 0);
    if !io::stdout().is_terminal() {
        return Style { width: asked, ..Style::PLAIN };
    }
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let width = terminal_size::terminal_size().map(|(width, _)| width.0);
    Style { color: !no_color, width: width.or(asked) }
}
