//! What each command does. Everything is checked, then computed, then written and printed.

mod mask;

use crate::arguments::Command;
use crate::error::CliError;

/// Runs a command.
pub(crate) fn run(command: Command) -> Result<(), CliError> {
    match command {
        Command::Mask(arguments) => mask::run(&arguments),
        _ => todo!(),
    }
}
