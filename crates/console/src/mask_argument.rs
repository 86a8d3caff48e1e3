//! MASK, the argument: a path to a JSON file or an expression.

use std::path::Path;

use counterpoint_files::{OpenFile, ReadLimits};
use counterpoint_mask::Mask;
use counterpoint_mask::expression::BUILDERS;

use crate::error::CliError;
use crate::files::{PIPE, read_text};

/// The path that `argument` names, where it is one: what names an existing file (or a pipe, as `<(...)` does) or ends in
/// `.json` is a file. What begins as a builder does is none, whatever files the current folder holds; `./` in front makes it one.
fn file(argument: &str) -> Option<&Path> {
    let builder = argument.split_once(':').map(|(name, _)| name);
    if BUILDERS.iter().any(|known| Some(known.name) == builder) {
        return None;
    }
    let path = Path::new(argument);
    (argument.ends_with(".json") || (path.exists() && !path.is_dir())).then_some(path)
}

/// Longest text that is read: ten times what a million slices take.
const MAX_TEXT_BYTES: u64 = 1 << 30;

/// A file that a mask's expression names, within the same limits, for a library: it writes no outputs that could replace it.
pub fn text_of(path: &str) -> Result<String, String> {
    let limits = ReadLimits { most_bytes: MAX_TEXT_BYTES, pipe: PIPE };
    OpenFile::open(Path::new(path)).and_then(|mut file| file.text(limits)).map_err(|error| error.to_string())
}

/// Reads the mask that `argument` names.
pub fn load(argument: &str) -> Result<Mask, CliError> {
    if argument.is_empty() {
        return Err(CliError::NoMask);
    }
    let Some(path) = file(argument) else {
        // The expression's own error names the file, and where in it that stands.
        let reason = |error| match error {
            CliError::Unreadable { source, .. } => source.to_string(),
            other => other.to_string(),
        };
        let read =
            |file: &str| read_text("file of the mask", Path::new(file), MAX_TEXT_BYTES).map_err(reason);
        return Mask::parse(argument, &read)
            .map_err(|source| CliError::MaskExpression { expression: argument.to_owned(), source });
    };
    Mask::from_json(&read_text("mask file", path, MAX_TEXT_BYTES)?)
        .map_err(|source| CliError::MaskFile { path: path.to_owned(), source })
}
