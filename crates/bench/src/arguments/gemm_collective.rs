//! What `bench gemm-collective` accepts.

use std::time::Duration;

use clap::Args;
use counterpoint_console::arguments::{Device, OverlapChoice, overlap, value};
use counterpoint_cost::ProblemSize;
use counterpoint_cuda::TransportKind;
use counterpoint_plan::GemmCollective;

use super::kernels::BenchDType;

/// Time matrix products with their collective: each overlap policy, on GPUs compared with cuBLASLt and NCCL one after the other
#[derive(Debug, Args)]
#[command(after_help = "\
m, n and k are those of the product that each rank computes. Before a
reduce-scatter or an all-reduce every rank has a partial sum of each element; under
all-gather each has m / ranks rows of the first operand.

Every row is checked against f64 on a sample of its elements, and bit by bit
against the first policy's result; a row out of bounds is not printed, and the
exit status is 1. Without --shapes it takes the shapes of published measurements
and the linear layers of Llama-3 70B and GPT-3 with 128 to 32768 rows.

--peers needs a python3 with PyTorch and a GPU for each rank. It times torch.mm and
NCCL one after the other, PyTorch's async-TP operators and its all-reduce in
symmetric memory, all interleaved with ours, on the same shapes.

Examples:
  counterpoint bench gemm-collective --ranks 2
  counterpoint bench gemm-collective --device cuda --ranks 2 --collective reduce-scatter
  counterpoint bench gemm-collective --device cuda --shapes 8192:8192:3584 --overlap fused --json")]
pub struct BenchGemmCollectiveArguments {
    /// Where ranks are: threads of this machine, or GPUs
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Ranks, each on a GPU of its own
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u32).range(2..=8), allow_hyphen_values = true)]
    pub(crate) ranks: u32,

    /// Collectives [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = value::collective())]
    pub(crate) collective: Vec<GemmCollective>,

    /// Products of m x n x k instead of the usual ones
    #[arg(long, value_name = "M:N:K", value_parser = value::product, value_delimiter = ',')]
    pub(crate) shapes: Vec<ProblemSize>,

    /// What moves rows between GPUs
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = value::transport())]
    pub(crate) transport: TransportKind,

    /// Groups of rows of policies that overlap a product with its own collective [default: as predicted]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), allow_hyphen_values = true)]
    pub(crate) groups: Option<u32>,

    /// Element type [default: bf16]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<BenchDType>,

    /// Overlap policies; results are compared with those of the first. auto: sequential or fused, by prediction
    #[arg(long, value_name = "POLICIES", default_value = "sequential,auto", value_delimiter = ',', value_parser = overlap::choice)]
    pub(crate) overlap: Vec<OverlapChoice>,

    /// Runs of one time at most; long ones get fewer
    #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Times of each row, interleaved
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000), allow_hyphen_values = true)]
    pub(crate) cycles: u32,

    /// Limit of every wait
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = value::seconds, allow_hyphen_values = true)]
    pub(crate) limit: Duration,

    /// Time PyTorch's variants too: mm-nccl, async-tp, symm-mem [given without names: all]
    #[arg(long, value_name = "NAMES", num_args = 0..=1, require_equals = true, default_missing_value = "mm-nccl,async-tp,symm-mem", value_delimiter = ',', value_parser = ["mm-nccl", "async-tp", "symm-mem"])]
    pub(crate) peers: Vec<String>,

    /// Few shapes, to see that everything works
    #[arg(long, conflicts_with = "shapes")]
    pub(crate) quick: bool,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}
