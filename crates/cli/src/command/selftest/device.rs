//! `counterpoint selftest --device …`.

use crate::arguments::SelftestArguments;
use crate::error::CliError;

/// Runs every check that the device has.
pub(super) fn run(_: &SelftestArguments) -> Result<(), CliError> {
    Err(CliError::NoCuda)
}
