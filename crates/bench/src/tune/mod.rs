//! `counterpoint tune`.

mod gemm;
mod moe;

pub(crate) use gemm::{dtype, only_threads, repeats, tp_size};

use counterpoint_console::CliError;

use crate::arguments::TuneCommand;

/// `counterpoint tune`.
///
/// # Errors
/// What the command refuses or what failed.
pub fn run(command: &TuneCommand) -> Result<(), CliError> {
    match command {
        TuneCommand::Gemm(arguments) => gemm::run(arguments),
        TuneCommand::Moe(arguments) => moe::run(arguments),
    }
}
