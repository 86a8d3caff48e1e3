//! `counterpoint selftest --compile-only`.

use crate::arguments::SelftestArguments;
use crate::error::CliError;

/// Compiles every kernel without a GPU and judges what came out.
pub(super) fn run(_: &SelftestArguments) -> Result<(), CliError> {
    Err(CliError::NoCuda)
}
