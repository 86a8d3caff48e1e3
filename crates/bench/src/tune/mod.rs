//! `counterpoint tune`.

mod gemm;
mod moe;

pub(crate) use gemm::{dtype, only_threads, repeats, tp_size};

use counterpoint_console::{CliError, CommandLine};

use crate::arguments::TuneCommand;

/// `counterpoint tune`, as `line` has it.
///
/// # Errors
/// What the command refuses or what failed.
pub fn run(command: &TuneCommand, line: &CommandLine) -> Result<(), CliError> {
    match command {
        TuneCommand::Gemm(arguments) => gemm::run(arguments, line),
        TuneCommand::Moe(arguments) => moe::run(arguments, line),
    }
}
