//! `counterpoint tune`.

mod gemm;

pub(super) use gemm::{dtype, only_threads, repeats, tp_size};

use crate::arguments::TuneCommand;
use crate::error::CliError;

/// `counterpoint tune`.
pub(crate) fn run(command: &TuneCommand) -> Result<(), CliError> {
    match command {
        TuneCommand::Gemm(arguments) => gemm::run(arguments),
    }
}
