//! The flags that decide a plan, and those of shapes: `plan`, `simulate`, `attention` and `bench` take them alike.

use std::path::PathBuf;

use clap::Args;
use counterpoint_choose::{MOST_COMPARED_RANKS, PassStages, QueryExchange};
use counterpoint_plan::{DType, GradientShares, Plan};

use super::value::{self, DispatchAsked};

/// What decides a plan, the same flags wherever one is made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Planning")]
pub struct PlanningArguments {
    /// Rows of a chunk, the unit that ranks own [default: by the length and the number of ranks]
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub chunk_size: Option<usize>,

    /// How chunks are assigned to ranks. auto: the one that is predicted to end forward and backward first on this kind of device,
    /// never by a measurement, because it decides bits; affinity on more than 256 ranks
    #[arg(long, value_name = "ALGORITHM", default_value = "auto", value_parser = value::dispatch())]
    pub dispatch: DispatchAsked,

    /// Stages of the remote work: one communicates while another computes. 0: all work at once, which takes rows of other ranks as
    /// they arrive. One number for both passes, or forward=N,backward=N
    #[arg(long, value_name = "auto|N", default_value = "auto", value_parser = value::stages, allow_hyphen_values = true)]
    pub stages: PassStages,

    /// Query offload: whether queries that see many keys of other ranks travel to these keys. auto: where both passes together are predicted
    /// to take 1 % less, and a pass that takes longer loses at most 0.65 of what the other gains. If --dispatch is named: where neither pass
    /// takes longer by the machine's profile, and never with --deterministic [default: auto with --dispatch auto on up to 256 ranks, else never]
    #[arg(long, value_name = "WHEN", value_parser = value::query_exchange())]
    pub query_exchange: Option<QueryExchange>,

    /// The type in which partial gradients of keys and values travel to be added in f32: f32 accumulators, or elements of the tensors' type,
    /// which are rounded, and half the bytes for bf16. With --deterministic always accumulators
    #[arg(long, value_name = "WHAT", default_value = "accumulators", value_parser = value::gradient_shares())]
    pub gradient_shares: GradientShares,

    /// The machine's measured profile, written by `doctor --calibrate`. Without it, `plan` and `simulate` take the built-in H200, and a run on
    /// GPUs takes what was measured there, if anything
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

impl PlanningArguments {
    /// When queries of so many ranks may travel. Where bits must be the same every time, not by what the machine was just measured to do, as
    /// the planner decides for a dispatch that is named; what is chosen with the dispatch follows the shipped figures.
    pub fn query_exchange_of(&self, ranks: usize, deterministic: bool) -> QueryExchange {
        match (self.query_exchange, self.dispatch, deterministic) {
            (Some(QueryExchange::Auto), DispatchAsked::Named(_), true) => QueryExchange::Never,
            (Some(asked), ..) => asked,
            (None, DispatchAsked::Auto, _) if ranks <= MOST_COMPARED_RANKS => QueryExchange::Auto,
            (None, ..) => QueryExchange::Never,
        }
    }

    /// When queries travel in `plan`, as it is printed: nobody asked for what was looked at and not taken.
    pub fn query_exchange_in(&self, plan: &Plan, deterministic: bool) -> QueryExchange {
        match (self.query_exchange, plan.ranks.iter().any(|rank| rank.hosted.is_some())) {
            (None, false) => QueryExchange::Never,
            _ => self.query_exchange_of(plan.ranks.len(), deterministic),
        }
    }
}

/// Shapes of tensors that do not come from a file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Shape")]
pub struct ShapeArguments {
    /// Query heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = value::size, allow_hyphen_values = true)]
    pub heads_q: usize,

    /// Key and value heads, a divisor of the query heads; as many as these when left out
    #[arg(long, value_name = "N", value_parser = value::size, allow_hyphen_values = true)]
    pub heads_kv: Option<usize>,

    /// Elements of a row of one head
    #[arg(long, value_name = "N", default_value = "128", value_parser = value::size, allow_hyphen_values = true)]
    pub head_dim: usize,

    /// Element type; left out, bf16 where the machine that is planned for is a GPU, else f32
    #[arg(long, value_name = "TYPE", value_parser = value::dtype())]
    pub dtype: Option<DType>,
}
