//! MASK, the argument: a path to a JSON file or an expression.

use std::fs;
use std::path::Path;

use counterpoint_mask::Mask;

use crate::error::CliError;

/// The path that `argument` names, where it is one: what names an existing file or ends in `.json` is a file.
pub(crate) fn file(argument: &str) -> Option<&Path> {
    let path = Path::new(argument);
    (argument.ends_with(".json") || path.is_file()).then_some(path)
}

/// Reads the mask that `argument` names.
pub(crate) fn load(argument: &str) -> Result<Mask, CliError> {
    if argument.is_empty() {
        return Err(CliError::NoMask);
    }
    let Some(path) = file(argument) else {
        let read = |file: &str| fs::read_to_string(file).map_err(|error| error.to_string());
        return Mask::parse(argument, &read)
            .map_err(|source| CliError::MaskExpression { expression: argument.to_owned(), source });
    };
    let unreadable = |source| CliError::Unreadable { what: "mask file", path: path.to_owned(), source };
    Mask::from_json(&fs::read_to_string(path).map_err(unreadable)?)
        .map_err(|source| CliError::MaskFile { path: path.to_owned(), source })
}
