//! `counterpoint selftest`.

mod compile_only;
mod crossing;
mod device;
mod job;
mod ledger;
mod processes;

use crate::arguments::SelftestArguments;
use crate::error::CliError;

/// `counterpoint selftest`.
pub(crate) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    if arguments.compile_only { compile_only::run(arguments) } else { device::run(arguments) }
}
