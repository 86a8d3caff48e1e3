//! What `bench cp` accepts.

use std::path::PathBuf;

use clap::Args;
use counterpoint_console::arguments::{Device, Exchange, OverlapList, PlanningArguments, overlap, value};
use counterpoint_cuda::TransportKind;
use counterpoint_mask::MaskPreset;

/// Time distributed attention over its ranks: TFLOP/s of a rank, and how that scales from one rank
#[derive(Debug, Args)]
#[command(after_help = "\
Every row is checked against the f64 reference on a sample of rows and keys; a
row out of bounds is not printed, and the exit status is 1.

The baseline of a row is the same mask on one rank, so a ratio of 1 is linear
scaling. Each GPU runs it by itself at the same time, and the slowest counts; under
a launcher the first rank's GPU runs it. Times are those of the slowest rank, from
the start of the first operation to the end of the last. The ranks, the baseline
and the same ranks without overlap run interleaved, because a GPU's clock changes.
What is hidden is by how much a run is shorter than the one without overlap.

--peers needs a python3 with PyTorch and two GPUs. It times Ulysses and all-gather
of keys and values with cuDNN, and PyTorch's ring attention, interleaved with ours.

Examples:
  counterpoint bench cp
  counterpoint bench cp --device cuda
  counterpoint bench cp --device cuda --cp-size 2 --tokens 8k,32k --masks full,causal --peers
  counterpoint bench cp --device cuda --tokens 8k --trace trace.json
  counterpoint bench cp --device cuda --tokens 1k,2k,4k --step
  counterpoint bench cp --device cuda --stages 2 --overlap kernel-barrier --json > rows.jsonl
  counterpoint bench cp --device cuda --tokens 8k --overlap kernel-barrier,priority,partition=16
  counterpoint bench cp --device cuda --overlap auto,concurrent,forward=concurrent,backward=sm-margin=16
  torchrun --no-python --nproc-per-node 4 counterpoint bench cp --device cuda \\
      --nodes 2 --exchange two-level,flat")]
pub struct BenchCpArguments {
    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Ranks [default: 2; with --device cuda as many as there are GPUs, at least 2]
    #[arg(long, value_name = "N", value_parser = value::cp_size, allow_hyphen_values = true)]
    pub(crate) cp_size: Option<usize>,

    /// Nodes that the ranks are spread over, evenly
    #[arg(long, value_name = "N", default_value = "1", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) nodes: usize,

    /// How rows travel between nodes; several give a row each
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',', default_value = "two-level")]
    pub(crate) exchange: Vec<Exchange>,

    /// Masks
    #[arg(
        long,
        value_name = "NAMES",
        value_parser = value::mask_preset(),
        value_delimiter = ',',
        default_value = "full,causal,varlen_full,varlen_causal,varlen_block_causal,block_causal_last_global,shared_question,sw_global,\
                         block_sparse"
    )]
    pub(crate) masks: Vec<MaskPreset>,

    /// Tokens of a rank [default: 1k; 8k,16k,32k with --device cuda]
    #[arg(long, value_name = "SIZES", value_parser = value::size, value_delimiter = ',')]
    pub(crate) tokens: Vec<usize>,

    /// Query and key heads [default: 4:2; 64:8 with --device cuda]
    #[arg(long, value_name = "Q:KV", value_parser = value::heads)]
    pub(crate) heads: Option<(usize, usize)>,

    /// Elements of a row of one head [default: 64; 128 with --device cuda]
    #[arg(long, value_name = "N", value_parser = value::size)]
    pub(crate) head_dim: Option<usize>,

    /// Leave the backward out
    #[arg(long)]
    pub(crate) forward_only: bool,

    /// Time whole steps, forward and backward: enqueued operation by operation, and replayed as one CUDA graph
    #[arg(long, conflicts_with_all = ["forward_only", "trace", "peers"])]
    pub(crate) step: bool,

    /// The backward's sums in an order that is always the same
    #[arg(long)]
    pub(crate) deterministic: bool,

    /// How communication overlaps computation; all that are named run interleaved, each for both passes or as
    /// forward=POLICY,backward=POLICY. auto: for each pass what is predicted to end first
    #[arg(long, value_name = "POLICIES", default_value = "auto", value_parser = overlap::of_passes_list)]
    pub(crate) overlap: OverlapList,

    /// How rows travel between GPUs; settings of NCCL may follow, as in nccl+max-ctas=8 or nccl+library-sums
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = value::transport())]
    pub(crate) transport: TransportKind,

    /// Timed runs of each row, at least 3
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(3..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Time PyTorch's context parallelisms too: ulysses, all_gather, ring [given without names: all]
    #[arg(long, value_name = "NAMES", num_args = 0..=1, require_equals = true, default_missing_value = "ulysses,all_gather,ring", value_delimiter = ',', value_parser = ["ulysses", "all_gather", "ring"])]
    pub(crate) peers: Vec<String>,

    /// Write a trace of the last run of every row to open in Perfetto, what was predicted below what was measured
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) planning: PlanningArguments,
}
