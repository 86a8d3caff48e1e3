//! `counterpoint selftest`.

mod compile_only;
mod crew;
mod crossing;
mod examiner;
mod hostile;
mod job;
mod ledger;
mod part;
mod processes;
mod session;
mod worker;

use crate::arguments::SelftestArguments;
use crate::error::CliError;

/// `counterpoint selftest`.
pub(crate) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    if arguments.compile_only {
        compile_only::run(arguments)
    } else if arguments.groups.is_empty() {
        session::run(arguments)
    } else {
        examiner::run(arguments)
    }
}
