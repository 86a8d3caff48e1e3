//! The machine that is planned for or predicted, as a file holds it.

use std::path::Path;

use counterpoint_plan::MachineProfile;

use crate::error::CliError;

/// The profile in a file; without one, the H200 that is built in.
pub(crate) fn load(path: Option<&Path>) -> Result<MachineProfile, CliError> {
    let Some(path) = path else { return Ok(MachineProfile::h200()) };
    let text = std::fs::read_to_string(path).map_err(|source| CliError::Unreadable {
        what: "machine profile",
        path: path.to_owned(),
        source,
    })?;
    MachineProfile::from_json(&text).map_err(|source| CliError::Profile { path: path.to_owned(), source })
}
