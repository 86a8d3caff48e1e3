//! What a flag's value disagrees with, and what to do.

use counterpoint_plan::{LinearBound, LinearKind, RoutingError};
use thiserror::Error;

/// What a flag's value disagrees with: another flag, the mask, the machine or the launcher. What it says follows the flag and the value.
#[derive(Debug, Error)]
pub enum FlagFault {
    /// The CPU has no such thing.
    #[error("is for GPUs; add --device cuda")]
    ForGpus,
    /// GPUs have no such thing.
    #[error("imitates a link between CPU ranks; leave it out with --device cuda")]
    ForCpuRanks,
    /// GPUs imitate no links.
    #[error("does not imitate links; leave --slow-link and --slow-network out, or use --device cpu")]
    ImitatesNoLinks,
    /// GPUs have no such tensors.
    #[error("takes bf16 and f16 tensors, not {dtype}; use one of them, or --device cpu")]
    GpuDType {
        /// The type that was asked for.
        dtype: &'static str,
    },
    /// A command that starts processes was started by a launcher.
    #[error("starts processes of its own; run it without a launcher")]
    StartsProcesses,
    /// A command that captures threads was started by a launcher.
    #[error("captures ranks that are threads; run it without a launcher")]
    CapturesThreads,
    /// A command that times GPUs of one process was started by a launcher.
    #[error("is timed with ranks as threads; run it without a launcher")]
    ThreadsAlone,
    /// A command that times CPU ranks of one process was started by a launcher.
    #[error("is timed with ranks as threads; run it without a launcher, or with --device cuda")]
    CpuThreadsAlone,
    /// Another number of ranks than of processes.
    #[error(
        "is not the number of processes, of which {launcher} started {processes}; start as many as ranks, or one without a launcher"
    )]
    Processes {
        /// Who started them.
        launcher: String,
        /// How many it started.
        processes: usize,
    },
    /// There are fewer GPUs.
    #[error("needs a GPU for each rank, and there are {gpus}")]
    Gpus {
        /// GPUs of the machine.
        gpus: usize,
    },
    /// One rank of what is about several.
    #[error("is one rank, and nothing travels; use at least 2")]
    OneRank,
    /// One GPU of what is about several ranks.
    #[error("is one rank, which moves nothing; give -g 2 to let two share it, or use more GPUs")]
    OneGpu,
    /// No rank of the plan.
    #[error("is not a rank: --cp-size {cp_size} has ranks 0 to {}", cp_size - 1)]
    NoRank {
        /// Its ranks.
        cp_size: usize,
    },
    /// Nodes that do not share the ranks evenly.
    #[error("does not divide --cp-size {cp_size}; every node holds the same number of ranks")]
    Nodes {
        /// Ranks.
        cp_size: usize,
    },
    /// A network within one node.
    #[error("is between nodes, and there is one; use --nodes 2 or more")]
    OneNode,
    /// Key heads that do not share the query heads evenly.
    #[error("must divide the {heads_q} query heads")]
    Heads {
        /// Query heads.
        heads_q: usize,
    },
    /// A length that is not the mask's.
    #[error(
        "disagrees with the mask, which has {queries} queries and {keys} keys; leave it out or change the mask"
    )]
    OfMask {
        /// Query rows of the mask.
        queries: usize,
        /// Its key columns.
        keys: usize,
    },
    /// A factor that statistics cannot hold.
    #[error(
        "is too small for statistics in {dtype}; give 0, or a magnitude from {smallest:e} to {largest:e}"
    )]
    Scale {
        /// Their type.
        dtype: &'static str,
        /// The smallest that is normal.
        smallest: f64,
        /// The largest that is taken.
        largest: f64,
    },
    /// A size of a layer.
    #[error("must be {0}")]
    Layer(LinearBound),
    /// A norm behind layers that have no whole rows.
    #[error("takes whole rows, of which {kind}-parallel layers give columns; use {flag} row")]
    WholeRows {
        /// Kind of the layers.
        kind: LinearKind,
        /// The flag that names another kind.
        flag: &'static str,
    },
    /// More choices than experts.
    #[error("is more than the {experts} experts; choose fewer")]
    Choices {
        /// Experts.
        experts: usize,
    },
    /// A number that is out of its range.
    #[error("must be from {least} to {most}")]
    Range {
        /// The least.
        least: f64,
        /// The most.
        most: f64,
    },
    /// A routing that is none.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// Layers that no plan splits so.
    #[error(transparent)]
    Plan(#[from] counterpoint_plan::PlanError),
    /// A policy that sends one product, of layers that are several.
    #[error("sends what one product makes, and these are several; name another policy")]
    OneProduct,
    /// A search over more than can be measured.
    #[error("makes {sequences} sequences, too many to measure each; use at most {most}")]
    Sequences {
        /// How many.
        sequences: u64,
        /// The most waves.
        most: u32,
    },
    /// A least size above the largest.
    #[error("is above --max-bytes {max_bytes}; swap them")]
    AboveMost {
        /// The largest.
        max_bytes: u64,
    },
    /// Nothing to call on the CPU.
    #[error("has nothing to call; give --device cuda")]
    NothingToCall,
    /// A name of no group of checks.
    #[error("is in the name of no group of checks; here are {}", groups.join(", "))]
    NoGroup {
        /// Those that there are.
        groups: Vec<&'static str>,
    },
    /// A name of no kernel.
    #[error("is in the name of no kernel; `counterpoint selftest --compile-only --verbose` lists them")]
    NoKernel,
    /// A file that cannot be added to.
    #[error("is not a regular file, and plans are added to those that it holds; name another")]
    NoRegularFile,
    /// A folder that is none.
    #[error("is not a folder; name one")]
    NoFolder,
    /// A path that cannot be looked up.
    #[error("{source}")]
    Path {
        /// The system's words.
        source: std::io::Error,
    },
}
