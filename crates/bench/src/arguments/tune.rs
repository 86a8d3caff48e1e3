//! What `tune` and `bench bandwidth` accept.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use counterpoint_console::arguments::{Device, overlap, value};
use counterpoint_cost::ProblemSize;
use counterpoint_cuda::TransportKind;
use counterpoint_exec::SlowLink;
use counterpoint_plan::{DType, GemmCollective};
use counterpoint_schedule::OverlapPolicy;

use super::{BenchTpPass, GradientArgument, TuneMoeArguments};

/// What to tune.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "the help of a command is the text of its arguments")]
pub enum TuneCommand {
    Gemm(TuneGemmArguments),
    Moe(TuneMoeArguments),
}

/// What times are taken on.
#[derive(Debug, Args)]
pub(crate) struct RanksArguments {
    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Ranks [default: 2; with --device cuda as many as there are GPUs, at least 2]
    #[arg(long, value_name = "N", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) tp_size: Option<usize>,

    /// How rows travel between GPUs; settings of NCCL may follow, as in nccl+max-ctas=8 or nccl+library-sums
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = value::transport())]
    pub(crate) transport: TransportKind,

    /// Imitate a link between CPU ranks
    #[arg(long, value_name = "ALPHA_US,GB_PER_S", value_parser = value::slow_link, allow_hyphen_values = true)]
    pub(crate) slow_link: Option<SlowLink>,

    /// Element type [default: bf16 on GPUs, f32 on CPUs]
    #[arg(long, value_name = "TYPE", value_parser = value::dtype())]
    pub(crate) dtype: Option<DType>,

    /// Runs of which a time is the median
    #[arg(long, value_name = "N", default_value = "7", value_parser = clap::value_parser!(u32).range(1..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Runs before those that count
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u32).range(0..=10_000), allow_hyphen_values = true)]
    pub(crate) warmups: u32,

    /// Limit of every wait
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = value::seconds, allow_hyphen_values = true)]
    pub(crate) limit: Duration,

    /// Print JSON and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Find the groups in which a product and its collective overlap best, and keep them
#[derive(Debug, Args)]
#[command(after_help = "\
The product is that of a layer's forward, or with --pass backward that of dx, after
which comes the gradient of the weight. Every overlap policy that these ranks have is
tried, with margins of several sizes, or those that --overlap names. Under each the
product is cut into waves. Some consecutive waves are a group: they are multiplied
together, and communicated together.
  predictive  measures products and collectives of some sizes, and computes the best
              sequence of groups from these
  exhaustive  measures every sequence of groups, 2^(waves - 1) of them
  both        does both, and compares
The result is compared with the pass without overlap, which is kept too. A sample of
every result is checked; a wrong one ends the command, and the exit status is 1.
Several products end with a summary: for how many the predicted sequence is as good
as the best of all, and how long searches took.

Plans are kept by device, transport, ranks, pass, shape, type, collective, bias,
gradient and policy in one file, in COUNTERPOINT_PROFILE_DIR or the user's
configuration folder. From then on `bench tp`, Python's layers, and programs that give
these plans to their group run layers of exactly that shape in the fastest way found.

Examples:
  counterpoint tune gemm --m 4k --n 4k --k 4k --collective reduce-scatter --tp-size 2
  counterpoint tune gemm --m 8k --n 8k --k 8k --collective all-reduce --device cuda --search both
  counterpoint tune gemm --shapes 8k:8k:3584,8k:12k:6k --device cuda --search both \\
      --collective reduce-scatter,all-reduce
  counterpoint tune gemm --m 1k --n 1k --k 1k --collective all-gather --slow-link 200,0.2 --json")]
pub struct TuneGemmArguments {
    /// Rows of the product
    #[arg(long, value_name = "N", value_parser = value::size, required_unless_present = "shapes", allow_hyphen_values = true)]
    pub(crate) m: Option<usize>,

    /// Columns of the product, of all ranks
    #[arg(long, value_name = "N", value_parser = value::size, required_unless_present = "shapes", allow_hyphen_values = true)]
    pub(crate) n: Option<usize>,

    /// K, the summands of each element, over all ranks
    #[arg(long, value_name = "N", value_parser = value::size, required_unless_present = "shapes", allow_hyphen_values = true)]
    pub(crate) k: Option<usize>,

    /// Several products instead of one, each with every collective
    #[arg(long, value_name = "M:N:K", value_parser = value::product, value_delimiter = ',', conflicts_with_all = ["m", "n", "k"])]
    pub(crate) shapes: Vec<ProblemSize>,

    /// The collective: all-gather before the product, or a sum after it
    #[arg(long, value_name = "NAMES", value_delimiter = ',', required = true, value_parser = value::collective())]
    pub(crate) collective: Vec<GemmCollective>,

    /// How groups are searched for
    #[arg(long, value_enum, default_value_t = SearchArgument::Predictive)]
    pub(crate) search: SearchArgument,

    /// Waves that the product is cut into [default: 16; with an exhaustive search 6]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), allow_hyphen_values = true)]
    pub(crate) waves: Option<u32>,

    /// The most groups that are looked at
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=64), allow_hyphen_values = true)]
    pub(crate) most_groups: u32,

    /// The pass: y, or dx and what follows
    #[arg(long, value_enum, default_value_t = BenchTpPass::Forward)]
    pub(crate) pass: BenchTpPass,

    /// What becomes of the gradient of the weight in a backward
    #[arg(long, value_name = "KIND", value_enum, default_value_t = GradientArgument::F32)]
    pub(crate) gradient: GradientArgument,

    /// A layer with a bias
    #[arg(long)]
    pub(crate) bias: bool,

    /// Policies that are tried [default: all that run on these ranks]
    #[arg(long, value_name = "POLICIES", value_delimiter = ',', value_parser = overlap::named)]
    pub(crate) overlap: Vec<OverlapPolicy>,

    /// The file that plans are kept in
    #[arg(long, value_name = "FILE")]
    pub(crate) plans: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) ranks: RanksArguments,
}

/// How groups are searched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SearchArgument {
    Predictive,
    Exhaustive,
    Both,
}

/// Time collectives of tokens over sizes, on CPU ranks or GPUs
#[derive(Debug, Args)]
#[command(after_help = "\
All-gather, reduce-scatter and all-reduce as linear layers use them, each by itself.
Size counts all ranks' rows, as nccl-tests does; algbw is size over time, and busbw
what the link of each rank carries. Every result is checked, element by element; a
wrong one is no row, and the exit status is 1.

Examples:
  counterpoint bench bandwidth
  counterpoint bench bandwidth --device cuda -b 1M -e 1G --transport nccl
  counterpoint bench bandwidth --collectives all-reduce --slow-link 200,0.5 --json > curve.jsonl")]
pub struct BenchBandwidthArguments {
    /// Collectives
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "all-gather,reduce-scatter,all-reduce", value_parser = value::collective())]
    pub(crate) collectives: Vec<GemmCollective>,

    /// Smallest size
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "64K", value_parser = value::bytes, allow_hyphen_values = true)]
    pub(crate) min_bytes: u64,

    /// Largest size
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "64M", value_parser = value::bytes, allow_hyphen_values = true)]
    pub(crate) max_bytes: u64,

    /// Each size is N times the one before
    #[arg(short = 'f', long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u64).range(2..=1024), allow_hyphen_values = true)]
    pub(crate) step_factor: u64,

    /// Elements of a row
    #[arg(long, value_name = "N", default_value = "1k", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) row_elements: usize,

    #[command(flatten)]
    pub(crate) ranks: RanksArguments,
}
