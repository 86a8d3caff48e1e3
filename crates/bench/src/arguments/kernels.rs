//! What `bench plan`, `bench fresh-masks` and `bench attention` accept, and the commands of `bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use counterpoint_console::arguments::{Device, value};
use counterpoint_mask::MaskPreset;

use super::{
    BenchBandwidthArguments, BenchCollectiveArguments, BenchCpArguments, BenchGemmArguments,
    BenchGemmCollectiveArguments, BenchMoeArguments, BenchTpArguments,
};

/// What to measure.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "the help of a command is the text of its arguments")]
pub enum BenchCommand {
    Plan(BenchPlanArguments),
    Attention(BenchAttentionArguments),
    FreshMasks(BenchFreshMasksArguments),
    Gemm(BenchGemmArguments),
    GemmCollective(BenchGemmCollectiveArguments),
    Cp(BenchCpArguments),
    Tp(BenchTpArguments),
    Moe(BenchMoeArguments),
    Bandwidth(BenchBandwidthArguments),
    GroupCast(BenchCollectiveArguments),
    GroupReduce(BenchCollectiveArguments),
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
pub struct BenchPlanArguments {
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

/// Time what a new mask costs: planning, making the plan ready, its first and later calls
#[derive(Debug, Args)]
#[command(after_help = "\
Rows: tables, from a mask to the plan and one rank's Programs, which a data loader
makes ahead; adopt, making that ready for calls; cold, all of it and the first
forward and backward; enqueue_forward and enqueue_backward, a later call. Masks
are packed documents, causal, another pack each time. On a GPU the last two rows
count what the driver was asked: to wait, and to make memory, streams or events.
Times are the host's, of all ranks of this process together.

Examples:
  counterpoint bench fresh-masks
  counterpoint bench fresh-masks --device cuda
  counterpoint bench fresh-masks --device cuda --ranks 4 --tokens 32k --json")]
pub struct BenchFreshMasksArguments {
    /// Where masks are called
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Ranks [default: 1; for tables 8 and 64]
    #[arg(long, value_name = "N", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) ranks: Option<usize>,

    /// Tokens of all ranks together [default: 32k, on the CPU 512; for tables 64k and 1M]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) tokens: Option<usize>,

    /// Threads that plan, in the rows `tables` and `cold`
    #[arg(long, value_name = "N", default_value = "1", value_parser = value::threads, allow_hyphen_values = true)]
    pub(crate) planning_threads: usize,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Time attention kernels: on the CPU against its matmul rate, on a GPU compared with cuDNN and PyTorch's flash backend
#[derive(Debug, Args)]
#[command(after_help = "\
Every row is checked against the f64 reference (on a GPU on a sample of rows
and keys); a row out of bounds is not printed, and the exit status is 1.

--device cuda takes the flags from --masks on. Its masks have packed documents of
realistic lengths, windows of 1024 and blocks of 2048; `counterpoint mask
preset:NAME,8k` shows one. --peers needs a python3 with PyTorch; runs of peers and
of ours are interleaved, and each peer's fastest variant counts. cudnn_flex
(nvidia-cudnn-frontend) and ffa (MagiAttention's flex_flash_attn_func, which
compiles each variant when it first runs) are packages of their own.

Examples:
  counterpoint bench attention
  counterpoint bench attention --quick
  counterpoint bench attention --json > rows.jsonl
  counterpoint bench attention --device cuda
  counterpoint bench attention --device cuda --masks causal,varlen_causal \\
      --seqlens 8k,32k --heads 64:8 --peers
  counterpoint bench attention --device cuda --peers=cudnn_flex,ffa \\
      --peer-folder /opt/peers
  counterpoint bench attention --device cuda --seqlens 1k,2k,4k --clock wall")]
pub struct BenchAttentionArguments {
    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Small shapes and few repeats, to see that everything works
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) cuda: CudaBenchArguments,
}

/// What only a GPU is asked.
#[derive(Debug, Args)]
pub(crate) struct CudaBenchArguments {
    /// Masks [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = value::mask_preset())]
    pub(crate) masks: Vec<MaskPreset>,

    /// Sequence lengths [default: 8k,16k,32k; --quick 8k]
    #[arg(long, value_name = "SIZES", value_parser = value::size, value_delimiter = ',')]
    pub(crate) seqlens: Vec<usize>,

    /// Query and key heads [default: 16:16,64:8; --quick 16:16]
    #[arg(long, value_name = "Q:KV", value_parser = value::heads, value_delimiter = ',')]
    pub(crate) heads: Vec<(usize, usize)>,

    /// Elements of a row of one head [default: 128]
    #[arg(long, value_name = "N", value_parser = value::size)]
    pub(crate) head_dim: Option<usize>,

    /// Element type [default: bf16]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<BenchDType>,

    /// Passes [default: all]
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',')]
    pub(crate) passes: Vec<BenchPass>,

    /// Timed runs of each row, at least 3 [default: 12; --quick 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: Option<u32>,

    /// Which clock [default: device]
    #[arg(long, value_enum)]
    pub(crate) clock: Option<BenchClock>,

    /// Which kernels: the GPU's own, or those that run on every GPU since Ampere [default: native]
    #[arg(long, value_enum)]
    pub(crate) kernels: Option<BenchKernels>,

    /// Time these too: PyTorch's cudnn, flash and flex (slow to compile), and cudnn_flex and ffa [given without names: cudnn,flash]
    #[arg(long, value_name = "NAMES", num_args = 0..=1, require_equals = true, default_missing_value = "cudnn,flash", value_delimiter = ',', value_parser = ["cudnn", "flash", "flex", "cudnn_flex", "ffa"])]
    pub(crate) peers: Vec<String>,

    /// Where Python packages of peers lie; a prepare.py there runs first [default: where python3 finds them]
    #[arg(long, value_name = "FOLDER", requires = "peers")]
    pub(crate) peer_folder: Option<PathBuf>,
}

impl CudaBenchArguments {
    /// The first flag that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        [
            (!self.masks.is_empty(), "--masks"),
            (!self.seqlens.is_empty(), "--seqlens"),
            (!self.heads.is_empty(), "--heads"),
            (self.head_dim.is_some(), "--head-dim"),
            (self.dtype.is_some(), "--dtype"),
            (!self.passes.is_empty(), "--passes"),
            (self.iterations.is_some(), "--iterations"),
            (self.clock.is_some(), "--clock"),
            (self.kernels.is_some(), "--kernels"),
            (!self.peers.is_empty(), "--peers"),
        ]
        .into_iter()
        .find_map(|(given, flag)| given.then_some(flag))
    }
}

/// An element type of the GPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchDType {
    Bf16,
    F16,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchPass {
    Forward,
    Backward,
    /// The backward in deterministic mode
    Deterministic,
}

/// What time is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchClock {
    /// The device's, around the kernels, with the level 2 cache flushed
    Device,
    /// The host's, over many runs, launches included
    Wall,
    /// The host's, over many replays of the run as a CUDA graph
    Graph,
}

/// Whose kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchKernels {
    Native,
    Portable,
}
