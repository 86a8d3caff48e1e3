//! What `bench moe` and `tune moe` accept.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use counterpoint_console::arguments::{Device, OverlapChoice, ValueFault, overlap, value};
use counterpoint_exec::SlowLink;
use counterpoint_plan::{DType, ExpertKind};

use super::{BenchTpPass, GradientArgument};

/// Time layers of experts (MoE): how much of their communication runs under their products
#[derive(Debug, Args)]
#[command(after_help = "\
A dispatch sends tokens to the experts that they chose and multiplies them there,
HIDDEN to INNER features; a combine multiplies, INNER to HIDDEN, and brings the
sums of a token's experts back. Every token chooses different experts at random;
with --skew some are more popular than others.

Every pass first runs without overlap, in one group, and its parts are measured
there. `of longer` is a pass over the longer part: the computation of the slowest
rank, or the communication. `hidden` is the share of the communication that runs under
computation. Results are compared with f64, token by token, on a sample of
columns, and their bits with those of the sequential run; a row that is wrong is
not printed, and the exit status is 1.

Examples:
  counterpoint bench moe
  counterpoint bench moe --slow-link 200,0.2 --tokens 512 --hidden 512 --inner 512
  counterpoint bench moe --experts 16 --choices 4 --skew 1 --kinds combine --json
  counterpoint bench moe --device cuda --tokens 4k --hidden 4k --inner 8k --experts 64")]
pub struct BenchMoeArguments {
    #[command(flatten)]
    pub(crate) layers: MoeLayersArguments,
}

/// Find the groups and the policies in which layers of experts overlap best, and keep them
#[derive(Debug, Args)]
#[command(after_help = "\
Tunes the passes of the layers that `bench moe` times. Each pass runs under every
overlap policy that these ranks have, or those that --overlap names, in the groups
that are predicted to be fastest: --trials in all, interleaved with the pass without
overlap. Results are compared with f64, and their bits with those of the sequential
run; a wrong one ends the command, and the exit status is 1.

The fastest groups under every policy are kept by device, transport, ranks, kind,
pass, gradient, experts, tokens, rows, features and type in the file of `tune gemm`.
From then on `bench moe`, Python's ExpertLayer, and programs that give these plans
to their group run such layers in the fastest way found.

Examples:
  counterpoint tune moe --tokens 512 --hidden 512 --inner 512
  counterpoint tune moe --device cuda --tokens 4k --hidden 4k --inner 8k --experts 64
  counterpoint tune moe --slow-link 200,0.2 --kinds combine --passes forward --json")]
pub struct TuneMoeArguments {
    /// Policies and groups of a pass that are measured: of every policy at least one
    #[arg(long, value_name = "N", default_value = "12", value_parser = clap::value_parser!(u32).range(1..=200), allow_hyphen_values = true)]
    pub(crate) trials: u32,

    /// The file that plans are kept in
    #[arg(long, value_name = "FILE")]
    pub(crate) plans: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) layers: MoeLayersArguments,
}

/// Which layers, and how they are timed.
#[derive(Debug, Args)]
pub(crate) struct MoeLayersArguments {
    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Ranks that share the experts [default: 2; with --device cuda as many as there are GPUs, at least 2]
    #[arg(long, value_name = "N", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) ep_size: Option<usize>,

    /// Tokens of each rank
    #[arg(long, value_name = "N", default_value = "256", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) tokens: usize,

    /// Features of a token
    #[arg(long, value_name = "N", default_value = "256", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) hidden: usize,

    /// Features inside an expert
    #[arg(long, value_name = "N", default_value = "256", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) inner: usize,

    /// Experts of all ranks
    #[arg(long, value_name = "N", default_value = "8", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) experts: usize,

    /// Experts of each token (top-k)
    #[arg(long, value_name = "N", default_value = "2", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) choices: usize,

    /// How unevenly experts are chosen: the n-th most popular one in proportion to 1 / n^F; 0: evenly
    #[arg(long, value_name = "F", default_value = "0", value_parser = skew, allow_hyphen_values = true)]
    pub(crate) skew: f64,

    /// Rows that an expert takes, in multiples of the mean; others are dropped [default: all are taken]
    #[arg(long, value_name = "F", value_parser = capacity, allow_hyphen_values = true)]
    pub(crate) capacity: Option<f64>,

    /// Which layers
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',', default_value = "dispatch,combine")]
    pub(crate) kinds: Vec<BenchMoeKind>,

    /// Passes
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',', default_value = "forward,backward")]
    pub(crate) passes: Vec<BenchTpPass>,

    /// How communication overlaps computation; auto: each pass as it was tuned, or else as it is predicted to end first
    #[arg(
        long,
        value_name = "POLICIES",
        value_parser = overlap::choice,
        value_delimiter = ',',
        default_value = "auto"
    )]
    pub(crate) overlap: Vec<OverlapChoice>,

    /// Element type [default: bf16 on GPUs, f32 on CPUs]
    #[arg(long, value_name = "TYPE", value_parser = value::dtype())]
    pub(crate) dtype: Option<DType>,

    /// What becomes of the gradients of the weights
    #[arg(long, value_name = "KIND", value_enum, default_value_t = GradientArgument::F32)]
    pub(crate) gradient: GradientArgument,

    /// Imitate a link between CPU ranks
    #[arg(long, value_name = "ALPHA_US,GB_PER_S", value_parser = value::slow_link, allow_hyphen_values = true)]
    pub(crate) slow_link: Option<SlowLink>,

    /// Timed runs of each row, at least 3
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(3..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Seed of tokens and choices
    #[arg(long, value_name = "N", default_value = "0", allow_hyphen_values = true)]
    pub(crate) seed: u64,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which way tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchMoeKind {
    /// Tokens to their experts, then the product
    Dispatch,
    /// The product, then sums back to the tokens
    Combine,
}

impl BenchMoeKind {
    pub(crate) fn kind(self) -> ExpertKind {
        match self {
            Self::Dispatch => ExpertKind::Dispatch,
            Self::Combine => ExpertKind::Combine,
        }
    }
}

fn skew(text: &str) -> Result<f64, ValueFault> {
    number(text, 0.0, 8.0)
}

fn capacity(text: &str) -> Result<f64, ValueFault> {
    number(text, 0.01, 1e6)
}

fn number(text: &str, least: f64, most: f64) -> Result<f64, ValueFault> {
    let number = text.parse::<f64>().ok().filter(|number| (least..=most).contains(number));
    number.ok_or(ValueFault::Range { least, most })
}
