//! What each command does. Everything is checked, then computed, then written and printed.

mod attention;
mod bench_attention;
mod bench_bandwidth;
mod bench_collective;
mod bench_cp;
mod bench_fresh_masks;
mod bench_gemm;
mod bench_gemm_collective;
mod bench_mask;
mod bench_plan;
mod bench_tp;
mod comparison;
mod doctor;
mod documents;
mod given;
mod launched;
mod mask;
mod nodes;
mod overlap;
mod plan;
mod prediction;
mod programs;
mod pytorch;
mod rank_machine;
mod selftest;
mod simulate;
mod solution;
mod tune;
mod turns;

use counterpoint_cuda::collective_bench::BenchCollective;

use crate::arguments::{BenchCommand, Command};
use crate::command_line::CommandLine;
use crate::error::CliError;

/// Runs a command.
pub(crate) fn run(command: Command, line: &CommandLine) -> Result<(), CliError> {
    match command {
        Command::Attention(arguments) => attention::run(*arguments, line),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Mask(arguments) => mask::run(&arguments),
        Command::Bench(BenchCommand::Plan(arguments)) => bench_plan::run(&arguments),
        Command::Bench(BenchCommand::Attention(arguments)) => bench_attention::run(&arguments),
        Command::Bench(BenchCommand::FreshMasks(arguments)) => bench_fresh_masks::run(&arguments),
        Command::Bench(BenchCommand::Gemm(arguments)) => bench_gemm::run(&arguments),
        Command::Bench(BenchCommand::GemmCollective(arguments)) => bench_gemm_collective::run(&arguments),
        Command::Bench(BenchCommand::Cp(arguments)) => bench_cp::run(&arguments, line),
        Command::Bench(BenchCommand::Tp(arguments)) => bench_tp::run(&arguments, line),
        Command::Bench(BenchCommand::GroupCast(arguments)) => {
            bench_collective::run(BenchCollective::GroupCast, &arguments, line)
        }
        Command::Bench(BenchCommand::GroupReduce(arguments)) => {
            bench_collective::run(BenchCollective::GroupReduce, &arguments, line)
        }
        Command::Bench(BenchCommand::Bandwidth(arguments)) => bench_bandwidth::run(&arguments),
        Command::Simulate(command) => simulate::run(&command),
        Command::Tune(command) => tune::run(&command),
        Command::Selftest(arguments) => selftest::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completions(arguments) => documents::completions(&arguments),
        Command::Man(arguments) => documents::man(&arguments),
    }
}
