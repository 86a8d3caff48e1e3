//! MASK, the argument: a path to a JSON file or an expression.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use counterpoint_mask::Mask;

use crate::console;
use crate::error::CliError;

/// The path that `argument` names, where it is one: what names an existing file (or a pipe, as `<(...)` does) or ends in
/// `.json` is a file.
pub(crate) fn file(argument: &str) -> Option<&Path> {
    let path = Path::new(argument);
    (argument.ends_with(".json") || (path.exists() && !path.is_dir())).then_some(path)
}

/// Reads the mask that `argument` names.
pub(crate) fn load(argument: &str) -> Result<Mask, CliError> {
    if argument.is_empty() {
        return Err(CliError::NoMask);
    }
    let Some(path) = file(argument) else {
        let read = |file: &str| read_text(Path::new(file)).map_err(|error| error.to_string());
        return Mask::parse(argument, &read)
            .map_err(|source| CliError::MaskExpression { expression: argument.to_owned(), source });
    };
    let unreadable = |source| CliError::Unreadable { what: "mask file", path: path.to_owned(), source };
    Mask::from_json(&read_text(path).map_err(unreadable)?)
        .map_err(|source| CliError::MaskFile { path: path.to_owned(), source })
}

/// Longest text that is read: ten times what a million slices take. A device that never ends ends here.
const MAX_TEXT_BYTES: u64 = 1 << 30;

fn read_text(path: &Path) -> io::Result<String> {
    read_bounded(path).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => io::Error::other("it is not UTF-8 text; save it as UTF-8"),
        _ => error,
    })
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    console::note_waiting(path, "writes to it");
    File::open(path)?.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_TEXT_BYTES {
        return Err(io::Error::other(format!("it is longer than {MAX_TEXT_BYTES} bytes")));
    }
    Ok(text)
}
