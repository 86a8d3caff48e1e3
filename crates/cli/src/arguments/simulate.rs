//! What `counterpoint simulate` accepts: attention, linear layers, experts, whole models.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use counterpoint_choose::LayerGroups;
use counterpoint_console::arguments::{
    OverlapChoice, OverlapList, PlanningArguments, ShapeArguments, overlap, value,
};
use counterpoint_console::{CliError, FlagFault};
use counterpoint_plan::{Activations, DType, ExpertKind, LinearKind, TransformerSpec};
use counterpoint_schedule::{OverlapPolicy, WeightGradient};

/// What to predict.
#[derive(Debug, Subcommand)]
pub(crate) enum SimulateCommand {
    Attention(SimulateAttentionArguments),
    Linear(SimulateLinearArguments),
    Moe(SimulateMoeArguments),
    Model(SimulateModelArguments),
}

/// What every prediction is made with.
#[derive(Debug, Args)]
pub(crate) struct SimulationArguments {
    /// Ranks of one NVLink domain; beyond it is the network
    #[arg(long, value_name = "N", default_value = "8", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) ranks_per_node: usize,

    /// Write the timelines for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Write a report to open in a browser
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,

    /// Print one JSON document and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Predict distributed attention
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  counterpoint simulate attention --mask causal:64k --cp-size 16 --heads-q 64 --heads-kv 8
  counterpoint simulate attention --mask varlen-causal:lengths=@documents.txt --cp-size 64")]
pub(crate) struct SimulateAttentionArguments {
    /// A JSON file or a builder expression; see `counterpoint mask --help`
    #[arg(long, value_name = "MASK")]
    pub(crate) mask: String,

    /// Ranks that share the sequence
    #[arg(long, value_name = "N", value_parser = value::cp_size, allow_hyphen_values = true)]
    pub(crate) cp_size: usize,

    #[command(flatten)]
    pub(crate) planning: PlanningArguments,

    #[command(flatten)]
    pub(crate) shape: ShapeArguments,

    /// How communication overlaps computation; may be several, each for both passes or as
    /// forward=POLICY,backward=POLICY. auto: what is run by default, for each pass what is predicted to end first
    #[arg(
        long,
        value_name = "POLICIES",
        default_value = "sequential,concurrent,single-connection,kernel-barrier,sm-margin=16,copy-engine,auto",
        value_parser = overlap::of_passes_list
    )]
    pub(crate) overlap: OverlapList,

    #[command(flatten)]
    pub(crate) simulation: SimulationArguments,
}

/// Predict a tensor-parallel linear layer, forward and backward
#[derive(Debug, Args)]
#[command(after_help = "\
Groups are the parts in which a pass is multiplied and travels: auto, a number of
equal ones, or the rows of each in the tokens of one rank, such as 256+512+256.

Examples:
  counterpoint simulate linear --kind row --tokens 8k --in-features 8k --out-features 8k --tp-size 8
  counterpoint simulate linear --kind row --rms-norm --tokens 8k --in-features 8k --out-features 8k --tp-size 8
  counterpoint simulate linear --kind column --tokens 8k --in-features 8k --out-features 57344 \\
      --tp-size 16 --groups 4 --overlap sequential,copy-engine --trace trace.json")]
pub(crate) struct SimulateLinearArguments {
    /// The axis of the weight that is split: column shares output features, row input features
    #[arg(long, value_enum)]
    pub(crate) kind: LinearKindArgument,

    /// What ranks have of the activations that are not split by features
    #[arg(long, value_enum, default_value_t = ActivationsArgument::SequenceParallel)]
    pub(crate) activations: ActivationsArgument,

    /// Tokens, of all ranks
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) tokens: usize,

    /// Columns of the input, of all ranks
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) in_features: usize,

    /// Columns of the output, of all ranks
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) out_features: usize,

    /// Ranks that share the layer
    #[arg(long, value_name = "N", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) tp_size: usize,

    /// Groups of tokens, or behind columns= of columns of sums, as in columns=4
    #[arg(long, value_name = "auto|N|ROWS+ROWS", default_value = "auto", value_parser = value::groups, allow_hyphen_values = true)]
    pub(crate) groups: LayerGroups,

    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = value::dtype())]
    pub(crate) dtype: DType,

    /// Put a residual and an RMSNorm behind a row-parallel layer. The norm takes rows in the order in which their groups arrive
    #[arg(long)]
    pub(crate) rms_norm: bool,

    /// The machine: a profile that `counterpoint doctor --calibrate` wrote [default: an H200 on NVLink, built in]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,

    /// How communication overlaps computation; may be several. auto: what is run by default
    #[arg(
        long,
        value_name = "POLICIES",
        value_delimiter = ',',
        default_value = "sequential,concurrent,single-connection,kernel-barrier,copy-engine,fused,auto",
        value_parser = overlap::choice
    )]
    pub(crate) overlap: Vec<OverlapChoice>,

    #[command(flatten)]
    pub(crate) simulation: SimulationArguments,
}

/// Predict a layer of a mixture of experts, forward and backward
#[derive(Debug, Args)]
#[command(after_help = "\
A dispatch sends tokens to the experts that they chose and multiplies them there;
a combine multiplies, and brings the sums of a token's experts back. Every token
chooses different experts at random; with --skew some are more popular than
others. Groups are those that are predicted to be fastest under each policy.
Products of all experts of a group are predicted as one launch.

Examples:
  counterpoint simulate moe --kind dispatch --tokens 4k --in-features 4k --out-features 8k \\
      --experts 64 --choices 4 --ep-size 8
  counterpoint simulate moe --kind combine --tokens 4k --in-features 8k --out-features 4k \\
      --experts 64 --choices 4 --ep-size 16 --skew 1 --trace trace.json")]
pub(crate) struct SimulateMoeArguments {
    /// The layer
    #[arg(long, value_enum)]
    pub(crate) kind: ExpertKindArgument,

    /// Tokens of each rank
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) tokens: usize,

    /// Columns of the input
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) in_features: usize,

    /// Columns of the output
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) out_features: usize,

    /// Experts of all ranks
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) experts: usize,

    /// Experts of each token (top-k)
    #[arg(long, value_name = "N", default_value = "2", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) choices: usize,

    /// How unevenly experts are chosen: the n-th most popular one in proportion to 1 / n^F; 0: evenly
    #[arg(long, value_name = "F", default_value = "0", allow_hyphen_values = true)]
    pub(crate) skew: f64,

    /// Ranks that share the experts
    #[arg(long, value_name = "N", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) ep_size: usize,

    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = value::dtype())]
    pub(crate) dtype: DType,

    /// The machine: a profile that `counterpoint doctor --calibrate` wrote [default: an H200 on NVLink, built in]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,

    /// How communication overlaps computation; may be several. auto: what is predicted to end first
    #[arg(
        long,
        value_name = "POLICIES",
        value_delimiter = ',',
        default_value = "sequential,concurrent,kernel-barrier,signals,copy-engine,auto",
        value_parser = overlap::choice
    )]
    pub(crate) overlap: Vec<OverlapChoice>,

    #[command(flatten)]
    pub(crate) simulation: SimulationArguments,
}

/// Which way tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertKindArgument {
    /// Tokens to their experts, then the product
    Dispatch,
    /// The product, then sums back to the tokens
    Combine,
}

impl From<ExpertKindArgument> for ExpertKind {
    fn from(kind: ExpertKindArgument) -> Self {
        match kind {
            ExpertKindArgument::Dispatch => ExpertKind::Dispatch,
            ExpertKindArgument::Combine => ExpertKind::Combine,
        }
    }
}

/// Predict a training step of a transformer, and how it scales
#[derive(Debug, Args)]
#[command(after_help = "\
Ranks are tensor-parallel groups, then context-parallel ones, then replicas, whose
gradients are reduce-scattered under the backward and whose weights are gathered
under the forward. Embeddings, the head, the optimizer and recomputation are left
out. Every replica takes its own sequences, so more ranks do more work.

Examples:
  counterpoint simulate model --model llama3-70b
  counterpoint simulate model --model gpt3-175b --ranks 8,512,4096 --tokens 2k --microbatches 8
  counterpoint simulate model --ranks 64 --cp-size 4 --tokens 128k --report step.html
  counterpoint simulate model --hidden 4k --heads-q 32 --heads-kv 8 --feed-forward 14k --layers 32 \\
      --activations replicated --gradient written")]
pub(crate) struct SimulateModelArguments {
    /// Sizes of the layers
    #[arg(long, value_name = "NAME", default_value = "llama3-70b", value_parser = value::model())]
    pub(crate) model: TransformerSpec,

    /// Layers [default: the model's]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) layers: Option<usize>,

    /// Elements of a token between blocks [default: the model's]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) hidden: Option<usize>,

    /// Query heads [default: the model's]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) heads_q: Option<usize>,

    /// Key and value heads [default: the model's]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) heads_kv: Option<usize>,

    /// Elements of a head [default: the model's]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) head_dim: Option<usize>,

    /// Elements inside the feed-forward block [default: the model's]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) feed_forward: Option<usize>,

    /// What ranks have of the activations that are not split by features
    #[arg(long, value_enum, default_value_t = ActivationsArgument::SequenceParallel)]
    pub(crate) activations: ActivationsArgument,

    /// What becomes of the gradients of weights
    #[arg(long, value_enum, default_value_t = WeightGradientArgument::Accumulated)]
    pub(crate) gradient: WeightGradientArgument,

    /// All ranks; may be several
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "8,64,512,4096", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) ranks: Vec<usize>,

    /// Ranks that share every linear layer
    #[arg(long, value_name = "N", default_value = "8", value_parser = value::ranks, allow_hyphen_values = true)]
    pub(crate) tp_size: usize,

    /// Ranks that share a sequence
    #[arg(long, value_name = "N", default_value = "1", value_parser = value::cp_size, allow_hyphen_values = true)]
    pub(crate) cp_size: usize,

    /// Tokens of a sequence, causal
    #[arg(long, value_name = "N", default_value = "8k", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) tokens: usize,

    /// Sequences of a replica between two updates
    #[arg(long, value_name = "N", default_value = "4", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) microbatches: usize,

    /// The machine: a profile that `counterpoint doctor --calibrate` wrote [default: an H200 on NVLink, built in]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,

    /// Groups of every linear layer: auto, or a number of equal ones
    #[arg(long, value_name = "auto|N", default_value = "auto", value_parser = value::groups, allow_hyphen_values = true)]
    pub(crate) groups: LayerGroups,

    /// How communication overlaps computation; may be several.
    #[arg(
        long,
        value_name = "POLICIES",
        value_delimiter = ',',
        default_value = "sequential,concurrent,single-connection,kernel-barrier,copy-engine",
        value_parser = overlap::named
    )]
    pub(crate) overlap: Vec<OverlapPolicy>,

    #[command(flatten)]
    pub(crate) simulation: SimulationArguments,
}

impl SimulateModelArguments {
    /// The model with the sizes that were given.
    pub(crate) fn sizes(&self) -> Result<TransformerSpec, CliError> {
        let model = self.model;
        let sizes = TransformerSpec {
            name: "of these sizes",
            layers: self.layers.unwrap_or(model.layers),
            hidden: self.hidden.unwrap_or(model.hidden),
            heads_q: self.heads_q.unwrap_or(model.heads_q),
            heads_kv: self.heads_kv.unwrap_or(model.heads_kv),
            head_dim: self.head_dim.unwrap_or(model.head_dim),
            feed_forward: self.feed_forward.unwrap_or(model.feed_forward),
            gated: model.gated,
        };
        if !sizes.heads_q.is_multiple_of(sizes.heads_kv) {
            let fault = FlagFault::Heads { heads_q: sizes.heads_q };
            return Err(CliError::flag("--heads-kv", sizes.heads_kv.to_string(), fault));
        }
        let named = TransformerSpec { name: model.name, ..sizes };
        Ok(if named == model { model } else { sizes })
    }
}

/// What becomes of the gradients of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightGradientArgument {
    /// Added to f32 in the products' epilogues (gradient accumulation fusion)
    Accumulated,
    /// Written in the weights' type
    Written,
}

impl From<WeightGradientArgument> for WeightGradient {
    fn from(gradient: WeightGradientArgument) -> Self {
        match gradient {
            WeightGradientArgument::Accumulated => WeightGradient::Accumulated(DType::F32),
            WeightGradientArgument::Written => WeightGradient::Written,
        }
    }
}

/// The axis of a weight that is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LinearKindArgument {
    Column,
    Row,
}

impl From<LinearKindArgument> for LinearKind {
    fn from(kind: LinearKindArgument) -> Self {
        match kind {
            LinearKindArgument::Column => LinearKind::Column,
            LinearKindArgument::Row => LinearKind::Row,
        }
    }
}

/// How activations lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationsArgument {
    /// All tokens on every rank; sums are all-reduced
    Replicated,
    /// Each rank its own tokens; inputs are all-gathered, sums reduce-scattered
    SequenceParallel,
}

impl From<ActivationsArgument> for Activations {
    fn from(activations: ActivationsArgument) -> Self {
        match activations {
            ActivationsArgument::Replicated => Activations::Replicated,
            ActivationsArgument::SequenceParallel => Activations::SequenceParallel,
        }
    }
}
