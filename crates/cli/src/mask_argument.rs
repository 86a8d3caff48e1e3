//! MASK, the argument: a path to a JSON file or an expression.

use std::fs;
use std::path::Path;

use counterpoint_mask::Mask;

use crate::error::CliError;

/// Reads the mask that `argument` names. What names an existing file or ends in `.json` is a file.
pub(crate) fn load(argument: &str) -> Result<Mask, CliError> {
    if argument.is_empty() {
        return Err(CliError::NoMask);
    }
    let invalid = |source| CliError::Mask { mask: argument.to_owned(), source };
    let path = Path::new(argument);
    if argument.ends_with(".json") || path.is_file() {
        let unreadable = |source| CliError::Unreadable { what: "mask file", path: path.to_owned(), source };
        return Mask::from_json(&fs::read_to_string(path).map_err(unreadable)?).map_err(invalid);
    }
    let read = |file: &str| fs::read_to_string(file).map_err(|error| error.to_string());
    Mask::parse(argument, &read).map_err(invalid)
}
