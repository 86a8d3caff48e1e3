//! What each command does. Everything is checked, then computed, then written and printed.

mod attention;
mod comparison;
mod doctor;
mod documents;
mod mask;
mod plan;
mod programs;
mod simulate;

use counterpoint_console::{CliError, CommandLine};

use crate::arguments::Command;

/// Runs a command.
pub(crate) fn run(command: Command, line: &CommandLine) -> Result<(), CliError> {
    match command {
        Command::Attention(arguments) => attention::run(*arguments, line),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Mask(arguments) => mask::run(&arguments),
        Command::Bench(command) => counterpoint_bench::bench(&command, line),
        Command::Simulate(command) => simulate::run(&command),
        Command::Tune(command) => counterpoint_bench::tune(&command, line),
        Command::Selftest(arguments) => counterpoint_verify::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completions(arguments) => documents::completions(&arguments),
        Command::Man(arguments) => documents::man(&arguments),
    }
}
