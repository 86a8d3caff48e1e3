//! What the command line accepts. `--help` at every level ends with examples.
//!
//! Every value that is a number may begin with a hyphen: its parser then refuses `-1` with the flag's name and the range,
//! where clap by itself would take it for an unknown argument.

mod attention;
mod doctor;
mod help;
mod mask;
mod plan;
mod simulate;
mod usage;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use counterpoint_bench::{BenchCommand, TuneCommand};
use counterpoint_schedule::RankTransport;
use counterpoint_verify::SelftestArguments;

pub(crate) use attention::{AttentionArguments, TensorArguments};
pub(crate) use doctor::DoctorArguments;
pub(crate) use help::{command, documented, help_text};
pub(crate) use mask::MaskArguments;
pub(crate) use plan::PlanArguments;
pub(crate) use simulate::{
    SimulateAttentionArguments, SimulateCommand, SimulateLinearArguments, SimulateModelArguments,
    SimulateMoeArguments, SimulationArguments,
};
pub(crate) use usage::usage_error;

/// Distributed attention whose communication runs under its computation.
#[derive(Debug, Parser)]
#[command(
    name = "counterpoint",
    version,
    max_term_width = 110,
    arg_required_else_help = false,
    after_help = "\
MASK is a path to a JSON file or an expression, such as:
  causal:64k                            each token sees itself and what is before it
  varlen-causal:lengths=300,4000,96     packed documents, causal inside each
  varlen-causal:lengths=@documents.txt  the same, lengths from a file
  sliding-window:32k,left=1023,right=0  itself and 1,023 tokens before
`counterpoint mask --help` has the whole list.

Examples:
  counterpoint mask varlen-causal:lengths=300,4000,96
  counterpoint plan --mask causal:64k --cp-size 8
  counterpoint attention --mask varlen-causal:lengths=600,1448 --cp-size 4 \\
      --backward --check --report report.html

Notes, progress and errors go to standard error. Tables fit the terminal, or
COLUMNS where there is none; NO_COLOR leaves colours out; --json is for programs
(docs/json.md). If the reader of standard output goes away (| head), that is not
an error; standard output that is closed (>&-) counts as /dev/null; one that
refuses what is written (a full disk) is exit status 1.

Exit status: 0 done; 1 it ran and a check or the run failed; 2 bad usage or bad
input; 3 the machine lacks what was asked for; 130 interrupted."
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Attention(Box<AttentionArguments>),
    Plan(PlanArguments),
    Mask(MaskArguments),
    /// Measure one part and print ratios against what a user would pick instead
    #[command(
        subcommand_required = true,
        arg_required_else_help = false,
        after_help = "\
Examples:
  counterpoint bench plan
  counterpoint bench attention --quick
  counterpoint bench gemm --device cuda
  counterpoint bench gemm-collective --device cuda
  counterpoint bench cp
  counterpoint bench group-cast -b 1M -e 1G -f 4
  counterpoint bench plan --json > rows.jsonl"
    )]
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Predict timelines and how they scale, on a modelled cluster
    #[command(
        subcommand_required = true,
        arg_required_else_help = false,
        after_help = simulate_help()
    )]
    #[command(subcommand)]
    Simulate(SimulateCommand),
    /// Find and keep the best overlap configuration of a shape on this machine
    #[command(
        subcommand_required = true,
        arg_required_else_help = false,
        after_help = "\
Examples:
  counterpoint tune gemm --m 4k --n 4k --k 4k --collective reduce-scatter --tp-size 2
  counterpoint tune gemm --m 8k --n 8k --k 8k --collective all-reduce --device cuda --search both"
    )]
    #[command(subcommand)]
    Tune(TuneCommand),
    Selftest(SelftestArguments),
    Doctor(DoctorArguments),
    Completions(CompletionsArguments),
    Man(ManArguments),
}

/// Print a shell's completions of this command line
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  counterpoint completions bash > ~/.local/share/bash-completion/completions/counterpoint
  counterpoint completions zsh > ~/.zfunc/_counterpoint
  counterpoint completions fish > ~/.config/fish/completions/counterpoint.fish")]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// Print the manual page of this program, or of one of its commands
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  counterpoint man | man -l -
  counterpoint man bench tp | man -l -
  counterpoint man > ~/.local/share/man/man1/counterpoint.1")]
pub(crate) struct ManArguments {
    /// A command, such as `attention` or `bench tp`
    pub(crate) command: Vec<String>,
}

fn simulate_help() -> String {
    format!(
        "\
Nothing runs and nothing is measured: Programs are played against the figures of a
machine. On GPUs a computation takes all multiprocessors, so two streams alone hide
nothing; policies differ in what lets communication start, and in what it takes.

Each row says whether a transport of that machine runs its policy; of those that
run, the one that is predicted to end first is marked, and what is run by default.

What runs where:
{}
Examples:
  counterpoint simulate model --model gpt3-175b --ranks 8,64,512,4096
  counterpoint simulate linear --kind row --tokens 8k --in-features 8k \\
      --out-features 8k --tp-size 8
  counterpoint simulate attention --mask causal:64k --cp-size 16 --dtype bf16",
        RankTransport::table()
    )
}

#[cfg(test)]
mod tests;
