//! What `counterpoint attention` accepts: its mask, tensors, way of running, and results.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use counterpoint_console::arguments::{Device, Exchange};
use counterpoint_console::arguments::{PassOverlaps, PlanningArguments, overlap, value};
use counterpoint_cuda::TransportKind;
use counterpoint_exec::SlowLink;
use counterpoint_plan::DType;

/// Run distributed attention on real tensors, and check it
#[derive(Debug, Args)]
#[command(after_help = "\
Input (safetensors; F64, F32, BF16 or F16):
  q     [seqlen_q, heads_q, head_dim]
  k     [seqlen_k, heads_kv, head_dim]
  v     [seqlen_k, heads_kv, head_dim_v]
  dout  [seqlen_q, heads_q, head_dim_v], with --backward
  sink  [seqlen_sink, heads_q], optional, F32 (or F64 with F64 tensors)
Output (safetensors): out, lse, with --max-logits max_logits [heads_q], and with
--backward dq, dk, dv (and dsink), in global token order whatever the dispatch
was.

Everything is checked first, then computed; then files are written, all of them
or none. A link is followed to the file that it names, also where that is not
there yet; a device or a pipe is written to before the files are. Results that
--check finds out of bounds are written too, to be looked at; the exit status is
then 1.

Examples:
  counterpoint attention --mask varlen-causal:lengths=600,1448 --cp-size 4 \\
      --backward --check --report report.html
  counterpoint attention --mask mask.json --input qkv.safetensors \\
      --output out.safetensors --cp-size 8
  counterpoint attention --mask causal:4k --heads-q 8 --heads-kv 2 --dtype bf16 \\
      --check --json
  counterpoint attention --mask causal:4k --cp-size 2 --stages 4 \\
      --slow-link 500,0.2 --trace trace.json
  counterpoint attention --mask causal:32k --device cuda --backward --cp-size 4
  counterpoint attention --mask causal:32k --device cuda --cp-size 2 \\
      --transport copy-engine --check")]
pub(crate) struct AttentionArguments {
    /// A JSON file or a builder expression; see `counterpoint mask --help`
    #[arg(long, value_name = "MASK")]
    pub(crate) mask: String,

    /// Ranks that share the sequence
    #[arg(long, value_name = "N", default_value = "1", value_parser = value::cp_size, allow_hyphen_values = true)]
    pub(crate) cp_size: usize,

    /// Nodes that the ranks are spread over, evenly
    #[arg(long, value_name = "N", default_value = "1", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) nodes: usize,

    #[command(flatten)]
    pub(crate) planning: PlanningArguments,

    #[command(flatten)]
    pub(crate) tensors: TensorArguments,

    #[command(flatten)]
    pub(crate) run: RunArguments,

    #[command(flatten)]
    pub(crate) results: ResultArguments,
}

/// Where the tensors come from.
#[derive(Debug, Args)]
#[command(next_help_heading = "Tensors")]
pub(crate) struct TensorArguments {
    /// Tensors to read (safetensors); random ones of the shape below when left out
    #[arg(long, value_name = "FILE", requires = "output")]
    pub(crate) input: Option<PathBuf>,

    /// Length of the random tensors; the mask has it already, so it must agree
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true, conflicts_with = "input")]
    pub(crate) seqlen: Option<usize>,

    /// Query heads of the random tensors [default: 8]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true, conflicts_with = "input")]
    pub(crate) heads_q: Option<usize>,

    /// Key and value heads of the random tensors, a divisor of the query heads [default: as many]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true, conflicts_with = "input")]
    pub(crate) heads_kv: Option<usize>,

    /// Elements of a row of one head of the random tensors [default: 128]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true, conflicts_with = "input")]
    pub(crate) head_dim: Option<usize>,

    /// Element type of the random tensors [default: f32; bf16 on GPUs]
    #[arg(long, value_name = "TYPE", value_parser = value::dtype(), conflicts_with = "input")]
    pub(crate) dtype: Option<DType>,

    /// Seed of the random tensors; the same seed gives the same numbers on every machine [default: 0]
    #[arg(long, value_name = "N", value_parser = value::seed, conflicts_with = "input", allow_hyphen_values = true)]
    pub(crate) seed: Option<u64>,

    /// Let NaN and infinity in the input pass
    #[arg(long)]
    pub(crate) allow_non_finite: bool,
}

/// How it is computed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Computation")]
pub(crate) struct RunArguments {
    /// What computes
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// How rows travel between GPUs: kernels that read the others' memory, copy engines, or NCCL; auto takes nvlink where
    /// all GPUs reach each other. NCCL's settings may follow nccl and hierarchical, as in nccl+cluster-size=0+max-ctas=8
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = value::transport())]
    pub(crate) transport: TransportKind,

    /// Compute the gradients too; reads dout
    #[arg(long)]
    pub(crate) backward: bool,

    /// Give the largest score of each query head too, over all ranks, as the softmax sees scores, without sinks (for QK-clip)
    #[arg(long)]
    pub(crate) max_logits: bool,

    /// Factor on q k^T: 0, or of a magnitude up to 1e6 that is normal in the type of the statistics (f64 for f64
    /// tensors, f32 for all others) [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "F", value_parser = value::scale, allow_hyphen_values = true)]
    pub(crate) scale: Option<f64>,

    /// Replace each score s by F tanh(s / F), F from 1e-6 to 1e6; 0 leaves scores alone
    #[arg(long, value_name = "F", default_value = "0", value_parser = value::softcap, allow_hyphen_values = true)]
    pub(crate) softcap: f64,

    /// Give the same bits for any overlap policy and any number of stages
    #[arg(long)]
    pub(crate) deterministic: bool,

    /// How communication overlaps computation: sequential, or concurrent, kernel-barrier or signals with any of
    /// +sm-margin=N (leave N workers free), +partition=N, +priority or +ordinary-priority, +single-connection, +copy-engine; one
    /// for both passes, or forward=POLICY,backward=POLICY. auto: for each pass the policy that is predicted to end first
    #[arg(long, value_name = "POLICY", default_value = "auto", value_parser = overlap::of_passes)]
    pub(crate) overlap: PassOverlaps,

    /// Limit of every wait of one rank for another
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = value::seconds, allow_hyphen_values = true)]
    pub(crate) limit: Duration,

    /// Imitate a slow link: microseconds of each collective, gigabytes a second of each rank
    #[arg(long, value_name = "ALPHA_US,GB_PER_S", value_parser = value::slow_link, allow_hyphen_values = true)]
    pub(crate) slow_link: Option<SlowLink>,

    /// Imitate a slow network between nodes, likewise
    #[arg(long, value_name = "ALPHA_US,GB_PER_S", value_parser = value::slow_link, allow_hyphen_values = true)]
    pub(crate) slow_network: Option<SlowLink>,

    /// How rows travel between nodes
    #[arg(long, value_enum, default_value_t = Exchange::TwoLevel)]
    pub(crate) exchange: Exchange,
}

/// Where results go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Results")]
pub(crate) struct ResultArguments {
    /// Write the results (safetensors); needed with --input
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Compare with the dense f64 reference; exit status 1 when out of bounds
    #[arg(long)]
    pub(crate) check: bool,

    /// Write a report to open in a browser
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,

    /// Write a trace to open in Perfetto
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print one JSON document and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}
