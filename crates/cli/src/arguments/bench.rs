use clap::{Args, Subcommand};

use super::value;

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    Plan(BenchPlanArguments),
    Attention(BenchAttentionArguments),
}

/// Time the planner, and compare balance and received rows of every dispatch
#[derive(Debug, Args)]
#[command(after_help = "\
Without --mask it takes two batches of 1M tokens of packed documents (lengths
drawn lognormal and heavy-tailed) on 8 and 64 ranks, and a causal mask of 4M
tokens on 1,024 ranks; it then prints the goals and whether they are reached.

Examples:
  counterpoint bench plan
  counterpoint bench plan --mask causal:1M --cp-size 8 --cp-size 64 --chunk-size 2048
  counterpoint bench plan --json > rows.jsonl")]
pub(crate) struct BenchPlanArguments {
    /// Plan these masks instead; a JSON file or an expression, may be given again
    #[arg(long, value_name = "MASK")]
    pub(crate) mask: Vec<String>,

    /// Ranks; may be given again
    #[arg(long, value_name = "N", default_values = ["8", "64"], value_parser = value::cp_size, allow_hyphen_values = true)]
    pub(crate) cp_size: Vec<usize>,

    /// Rows of a chunk
    #[arg(long, value_name = "N", default_value = "512", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) chunk_size: usize,

    /// Solves to time for each row, at least 10 [default: 10]
    #[arg(long, value_name = "N", default_value = "10", hide_default_value = true, value_parser = clap::value_parser!(u32).range(10..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Time CPU attention against the matmul rate of the same library, and show what overlap hides
#[derive(Debug, Args)]
#[command(after_help = "\
Every row is checked against the f64 reference; a row out of bounds is not
printed, and the exit status is 1.

Examples:
  counterpoint bench attention
  counterpoint bench attention --quick
  counterpoint bench attention --json > rows.jsonl")]
pub(crate) struct BenchAttentionArguments {
    /// Small shapes and few repeats, to see that everything works
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}
