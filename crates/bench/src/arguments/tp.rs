//! What `bench tp` accepts.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use counterpoint_choose::LayerGroups;
use counterpoint_console::arguments::{Device, OverlapChoice, overlap, value};
use counterpoint_cuda::{PlainProducts, TransportKind};
use counterpoint_exec::{LayerGradient, SlowLink};
use counterpoint_plan::{Activations, DType, LinearKind};
use serde::{Deserialize, Serialize};

use super::LayerShape;

/// Time tensor-parallel linear layers: how much of their communication runs under their products
#[derive(Debug, Args)]
#[command(after_help = "\
A shape is tokens, features of the side that is not split, and features that a
rank has of the side that is: T:HIDDEN:LOCAL is a column-parallel layer from
HIDDEN to LOCAL features a rank, and a row-parallel one back.

Every case first runs without overlap, in one group; the others are compared with
the parts of that run. The ideal hides all that can be hidden: in a forward the
shorter of products and communication, in a column-parallel backward the sums of dx
under the gradient of the weight.
  efficiency  (sequential - this) / (sequential - ideal): 0 is sequential, 1 ideal
  speedup     sequential / this
  hidden      1 - exposed / communication; of a fused pass, whose kernels send as
              they multiply, (sequential - this) / communication
Efficiencies and hidden shares that are not known to 0.2 are not printed.

Results are compared with f64 on a sample of elements, and their bits with those of
the sequential run; a row that is wrong is not printed, and the exit status is 1.

With --rms-norm the norm is part of both passes. In the sequential run rows are in
order, and the norm is a pass of its own. In runs in groups rows are in the order in
which they arrived, and the norm puts them back into order.

With --shared-input N each shape is N layers from HIDDEN to LOCAL features a rank.
First they run as N separate layers, one after the other. `vs apart` is the time of
these over the time of the shared ones, without the additions of the N gradients of
the input.

--peers needs a python3 with PyTorch and GPUs. It times torch.mm with NCCL's
collectives in Megatron-LM's order, and PyTorch's fused operators, in processes with
CUDA_DEVICE_MAX_CONNECTIONS unset, 1 and 32, interleaved with ours. With
--connections, ours are shown next to peers with the same number.

Examples:
  counterpoint bench tp
  counterpoint bench tp --slow-link 500,0.05 --shapes 1k:1k:512
  counterpoint bench tp --kinds row --rms-norm --overlap signals,fused
  counterpoint bench tp --shared-input 3 --shapes 1k:512:256
  counterpoint bench tp --device cuda --tp-size 2
  torchrun --nproc-per-node 4 --no-python counterpoint bench tp --device cuda --transport nvlink
  counterpoint bench tp --device cuda --kinds column --passes backward \\
      --activations replicated --peers
  counterpoint bench tp --device cuda --kinds column --passes backward --connections 1,8,32
  counterpoint bench tp --device cuda --shapes 8k:8k:7k \\
      --overlap kernel-barrier,concurrent+sm-margin=16 --json")]
pub struct BenchTpArguments {
    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Ranks [default: 2; with --device cuda as many as there are GPUs, at least 2]
    #[arg(long, value_name = "N", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) tp_size: Option<usize>,

    /// Shapes [default: 512:256:256; with --device cuda 2048:12288:12288,8192:8192:7168,16384:8192:7168]
    #[arg(long, value_name = "T:HIDDEN:LOCAL", value_parser = LayerShape::parse, value_delimiter = ',')]
    pub(crate) shapes: Vec<LayerShape>,

    /// Kinds of layers
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',', default_value = "column,row")]
    pub(crate) kinds: Vec<BenchTpKind>,

    /// Passes
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',', default_value = "forward,backward")]
    pub(crate) passes: Vec<BenchTpPass>,

    /// How activations that are not split by features lie
    #[arg(
        long,
        value_name = "NAMES",
        value_enum,
        value_delimiter = ',',
        default_value = "replicated,sequence-parallel"
    )]
    pub(crate) activations: Vec<BenchTpActivations>,

    /// Layers with a bias
    #[arg(long)]
    pub(crate) bias: bool,

    /// How communication overlaps computation; auto: each pass as `tune gemm` found it fastest, or else as it is predicted to end first
    #[arg(
        long,
        value_name = "POLICIES",
        value_parser = overlap::choice,
        value_delimiter = ',',
        default_value = "auto"
    )]
    pub(crate) overlap: Vec<OverlapChoice>,

    /// Groups of a pass under a policy that is named: a number of groups of tokens, their rows as in 512+256, or groups of columns of sums as in
    /// columns=4. auto: those that `tune gemm` kept for the layer under it, or else by prediction
    #[arg(long, value_name = "GROUPS", value_delimiter = ',', default_value = "auto", value_parser = value::groups, allow_hyphen_values = true)]
    pub(crate) groups: Vec<LayerGroups>,

    /// How rows travel between GPUs; settings of NCCL may follow, as in nccl+max-ctas=8 or nccl+library-sums
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "auto", value_parser = value::transport())]
    pub(crate) transport: Vec<TransportKind>,

    /// What computes the products of passes without communication, on GPUs: this program's kernels, or cuBLASLt
    #[arg(long, value_name = "NAME", value_enum, default_value_t = BenchTpProducts::Ours)]
    pub(crate) plain_products: BenchTpProducts,

    /// Element type [default: bf16 on GPUs, f32 on CPUs]
    #[arg(long, value_name = "TYPE", value_parser = value::dtype())]
    pub(crate) dtype: Option<DType>,

    /// What becomes of the gradient of the weight
    #[arg(long, value_name = "KIND", value_enum, default_value_t = GradientArgument::F32)]
    pub(crate) gradient: GradientArgument,

    /// Put a residual and an RMSNorm behind row-parallel layers. The norm takes rows in the order in which their groups arrive; its
    /// gradients are part of the backward
    #[arg(long, conflicts_with_all = ["peers", "connections"])]
    pub(crate) rms_norm: bool,

    /// Time so many column-parallel layers of one input (such as q, k and v), which share its gather and the sum of its gradient, compared
    /// with as many separate layers
    #[arg(long, value_name = "LAYERS", value_parser = clap::value_parser!(u32).range(2..=16), conflicts_with_all = ["kinds", "groups", "rms_norm", "peers", "connections", "trace"], allow_hyphen_values = true)]
    pub(crate) shared_input: Option<u32>,

    /// Imitate a link between CPU ranks
    #[arg(long, value_name = "ALPHA_US,GB_PER_S", value_parser = value::slow_link, allow_hyphen_values = true)]
    pub(crate) slow_link: Option<SlowLink>,

    /// Timed runs of each row, at least 3
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(3..=10_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Measure with each of these numbers of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), in a process each, and say how far
    /// apart the results are
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=32), allow_hyphen_values = true)]
    pub(crate) connections: Vec<u32>,

    /// Time PyTorch's variants too, with these CUDA_DEVICE_MAX_CONNECTIONS [given without numbers: 8, which is unset, 1 and 32]
    #[arg(long, value_name = "NUMBERS", num_args = 0..=1, require_equals = true, default_missing_value = "8,1,32", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=32))]
    pub(crate) peers: Vec<u32>,

    /// Write the last run of every row to a trace to open in Perfetto
    #[arg(long, value_name = "FILE", conflicts_with = "connections")]
    pub(crate) trace: Option<PathBuf>,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which features are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchTpKind {
    /// Output features are split (column-parallel)
    Column,
    /// Input features are split (row-parallel)
    Row,
}

impl BenchTpKind {
    pub(crate) fn kind(self) -> LinearKind {
        match self {
            Self::Column => LinearKind::Column,
            Self::Row => LinearKind::Row,
        }
    }
}

/// Which pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BenchTpPass {
    /// y
    Forward,
    /// dx, and the gradient of the weight added to f32
    Backward,
}

impl std::fmt::Display for BenchTpPass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.pad(value.get_name()))
    }
}

/// What becomes of the gradient of the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum GradientArgument {
    /// The weight is frozen: there is none
    Frozen,
    /// It is written, in the layer's type
    Written,
    /// It is added to f32, or to f64 where the layer is f64
    F32,
    /// It is added to the layer's type
    Own,
}

impl GradientArgument {
    pub(crate) fn gradient(self, dtype: DType) -> LayerGradient {
        match self {
            Self::Frozen => LayerGradient::Frozen,
            Self::Written => LayerGradient::Written,
            Self::F32 => LayerGradient::Accumulated(dtype.accumulator()),
            Self::Own => LayerGradient::Accumulated(dtype),
        }
    }
}

/// Who computes plain products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchTpProducts {
    /// This program's kernels
    Ours,
    /// NVIDIA's library
    Cublaslt,
}

impl BenchTpProducts {
    pub(crate) fn products(self) -> PlainProducts {
        match self {
            Self::Ours => PlainProducts::Ours,
            Self::Cublaslt => PlainProducts::CublasLt,
        }
    }
}

/// Who has which tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchTpActivations {
    /// All ranks have all of them
    Replicated,
    /// Each rank has its own
    SequenceParallel,
}

impl BenchTpActivations {
    pub(crate) fn activations(self) -> Activations {
        match self {
            Self::Replicated => Activations::Replicated,
            Self::SequenceParallel => Activations::SequenceParallel,
        }
    }
}
