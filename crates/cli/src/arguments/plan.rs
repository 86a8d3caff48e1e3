//! What `counterpoint plan` accepts.

use std::path::PathBuf;

use clap::Args;
use counterpoint_console::arguments::{PlanningArguments, ShapeArguments, value};

/// Solve and explain a plan without running it
#[derive(Debug, Args)]
#[command(after_help = "\
Stages are cut and times predicted for one machine: that of --profile, whichever
it is, or a built-in model of H200s. Nothing is measured here but the solve time,
so the same command prints the same plan on every machine. Token counts are key
rows received. Up to 256 ranks every dispatch is planned and predicted, and the
one of --dispatch is marked; a balance above 1.02 is explained.

Examples:
  counterpoint plan --mask causal:64k --cp-size 8
  counterpoint plan --mask varlen-causal:lengths=@documents.txt --cp-size 16 --nodes 2
  counterpoint plan --mask mask.json --cp-size 4 --dispatch zigzag --json
  counterpoint plan --mask causal:64k --cp-size 8 --report plan.html
  counterpoint plan --mask causal:4k --cp-size 4 --program 1")]
pub(crate) struct PlanArguments {
    /// A JSON file or a builder expression; see `counterpoint mask --help`
    #[arg(long, value_name = "MASK")]
    pub(crate) mask: String,

    /// Ranks that share the sequence
    #[arg(long, value_name = "N", value_parser = value::cp_size, allow_hyphen_values = true)]
    pub(crate) cp_size: usize,

    /// Nodes that the ranks are spread over, evenly
    #[arg(long, value_name = "N", default_value = "1", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) nodes: usize,

    #[command(flatten)]
    pub(crate) planning: PlanningArguments,

    #[command(flatten)]
    pub(crate) shape: ShapeArguments,

    /// Threads that plan; the plan is the same for any number
    #[arg(long, value_name = "N", default_value = "1", value_parser = value::threads, allow_hyphen_values = true)]
    pub(crate) planning_threads: usize,

    /// Write a report to open in a browser
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,

    /// Print the Programs of a rank, or of all ranks when no rank is named, one line an operation, and nothing else
    #[arg(long, value_name = "RANK", num_args = 0..=1, conflicts_with_all = ["json", "report"])]
    pub(crate) program: Option<Option<usize>>,

    /// Print one JSON document and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}
