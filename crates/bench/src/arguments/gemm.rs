//! What `bench gemm` accepts.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use counterpoint_console::arguments::{Device, value};
use counterpoint_cost::ProblemSize;

use super::kernels::{BenchDType, BenchKernels};

/// Time matrix products on a GPU compared with cuBLASLt
#[derive(Debug, Args)]
#[command(after_help = "\
Without --shapes it takes the linear layers of Llama-3 70B and GPT-3 with 128 to
32768 rows, and the shapes of products whose collectives are to be hidden, forward
and backward. Every row is checked against f64 on a sample of its elements; a row
out of bounds is not printed, and the exit status is 1. Runs of both are interleaved,
with the level 2 cache flushed before each run.

Layouts: nt is x W^T, nn is dy W, tn is dy^T x, added to an f32 gradient.

--experts divides the rows of each product (m; of tn k) among experts with a weight
each, within a fifth of the mean, and times one launch for all of them, a launch for
each, cuBLASLt's for each, and cuBLASLt's product of as many rows with one weight.
Without numbers and --shapes it takes layers of 8 to 32 experts, all three layouts.
--peers needs a python3 with PyTorch, whose grouped_mm stores tn in bf16; deepgemm is
a package of its own, whose rows are filled up to multiples of 128 beforehand.

Examples:
  counterpoint bench gemm --device cuda
  counterpoint bench gemm --device cuda --shapes 8192:8192:3584,4096:4096:4096 --layouts nt,nn
  counterpoint bench gemm --device cuda --kernels portable --shapes 8192:8192:4096 --tiles 16
  counterpoint bench gemm --device cuda --shapes 512:8192:8192 --tiles 4 --json
  counterpoint bench gemm --device cuda --experts --peers
  counterpoint bench gemm --device cuda --experts=8,32 --shapes 8192:1024:2048 \\
      --layouts nt,nn --peers=torch,deepgemm --peer-folder /opt/peers")]
pub struct BenchGemmArguments {
    /// What to measure; only GPUs have these kernels
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Products of m x n x k instead of the usual ones
    #[arg(long, value_name = "M:N:K", value_parser = value::product, value_delimiter = ',')]
    pub(crate) shapes: Vec<ProblemSize>,

    /// Layouts of --shapes [default: nt]
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',', requires = "shapes")]
    pub(crate) layouts: Vec<BenchGemmLayout>,

    /// Grouped products: the rows of --shapes divided among these numbers of experts [without numbers: the usual layers of experts]
    #[arg(long, value_name = "NUMBERS", num_args = 0..=1, require_equals = true, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) experts: Option<Vec<u32>>,

    /// Time these grouped products too: PyTorch's torch, and deepgemm [given without names: torch]
    #[arg(long, value_name = "NAMES", num_args = 0..=1, require_equals = true, default_missing_value = "torch", value_delimiter = ',', value_parser = ["torch", "deepgemm"], requires = "experts")]
    pub(crate) peers: Vec<String>,

    /// Where Python packages of peers lie; a prepare.py there runs first [default: where python3 finds them]
    #[arg(long, value_name = "FOLDER", requires = "peers")]
    pub(crate) peer_folder: Option<PathBuf>,

    /// Element type of the operands [default: bf16]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<BenchDType>,

    /// Which kernels: the GPU's own, or those that run on every GPU since Ampere [default: native]
    #[arg(long, value_enum)]
    pub(crate) kernels: Option<BenchKernels>,

    /// Multiprocessors that both leave free
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=130), allow_hyphen_values = true)]
    pub(crate) sm_margin: u32,

    /// Time the N shapes of tiles that are estimated to be fastest, not only the first
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64), allow_hyphen_values = true)]
    pub(crate) tiles: u32,

    /// Timed runs of each row at most, at least 4; long ones get fewer [default: 12]
    #[arg(long, value_name = "N", default_value_t = 12, hide_default_value = true, value_parser = clap::value_parser!(u32).range(4..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Few shapes, to see that everything works
    #[arg(long, conflicts_with = "shapes")]
    pub(crate) quick: bool,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// How operands lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchGemmLayout {
    /// A [m, k], B [n, k]
    Nt,
    /// A [m, k], B [k, n]
    Nn,
    /// A [k, m], B [k, n]
    Tn,
}
