//! The commands that measure, `bench` and `tune`: interleaved runs, medians, rows, and PyTorch for comparison.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod arguments;
mod attention;
mod bandwidth;
mod collective;
mod cp;
mod fresh_masks;
mod gemm;
mod gemm_collective;
pub mod gpu;
mod hidden;
mod interleaved;
mod masks;
mod moe;
mod plan;
mod pytorch;
mod ranks;
mod rows;
mod tp;
mod tune;

use crate::gpu::collective::BenchCollective;
pub use arguments::{BenchCommand, TuneCommand};
use counterpoint_console::{CliError, CommandLine};
pub use tune::run as tune;

/// `counterpoint bench`, as `line` has it.
///
/// # Errors
/// What the command refuses or what failed.
pub fn bench(command: &BenchCommand, line: &CommandLine) -> Result<(), CliError> {
    match command {
        BenchCommand::Plan(arguments) => plan::run(arguments),
        BenchCommand::Attention(arguments) => attention::run(arguments),
        BenchCommand::FreshMasks(arguments) => fresh_masks::run(arguments),
        BenchCommand::Gemm(arguments) => gemm::run(arguments),
        BenchCommand::GemmCollective(arguments) => gemm_collective::run(arguments),
        BenchCommand::Cp(arguments) => cp::run(arguments, line),
        BenchCommand::Tp(arguments) => tp::run(arguments, line),
        BenchCommand::Moe(arguments) => moe::run(arguments, line),
        BenchCommand::GroupCast(arguments) => collective::run(BenchCollective::GroupCast, arguments, line),
        BenchCommand::GroupReduce(arguments) => {
            collective::run(BenchCollective::GroupReduce, arguments, line)
        }
        BenchCommand::Bandwidth(arguments) => bandwidth::run(arguments),
    }
}
