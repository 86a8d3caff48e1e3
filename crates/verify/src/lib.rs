//! `counterpoint selftest`: the groups of checks of a machine, side by side in processes of their own.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod arguments;
mod cannot_begin;
mod case_fault;
mod compile_only;
mod crew;
mod examiner;
pub mod gpu;
mod group;
mod hostile;
mod inter_node;
mod job;
mod ledger;
mod part;
mod processes;
mod session;
mod worker;

use counterpoint_console::CliError;

pub use crate::arguments::SelftestArguments;

/// `counterpoint selftest`.
///
/// # Errors
/// What the command refuses, what failed, and checks that failed.
pub fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    if arguments.compile_only {
        compile_only::run(arguments)
    } else if arguments.groups.is_empty() {
        session::run(arguments)
    } else {
        examiner::run(arguments)
    }
}
