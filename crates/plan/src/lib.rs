//! What follows from a mask and what was chosen for it: who computes what, and who sends what to whom.
//!
//! Pure and deterministic: the same input gives the same plan on every rank, so no rank sends another its plan.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod bounds;
mod byte_format;
mod bytes;
mod cache;
mod dispatch;
mod division;
mod error;
mod exchange;
mod experts;
mod fingerprint;
mod gemm_collective;
mod group_part;
mod hierarchy;
mod hosting;
mod layout;
mod linear;
mod linear_spec;
mod outline;
mod plan;
mod planning;
mod rank_outline;
mod receive_order;
mod row_list;
mod runs;
mod spec;
mod stage_cuts;
mod summary;
mod topology;
mod transformer;
mod work;

pub use bounds::TrafficBounds;
pub use byte_format::{ByteFormat, BytesFault, Rest};
pub use cache::PlanCache;
pub use dispatch::{
    ChunkWork, Dispatch, chunk_work, chunk_work_with_offload, chunk_work_without, received_rows,
    received_rows_lower_bound,
};
pub use division::{Division, Owners};
pub use error::{LinearBound, LinearField, PlanError};
pub use exchange::{GroupPart, OwnedSplit, RemoteSplit};
pub use experts::{
    ArrivingGroup, ArrivingRows, ExpertCapacity, ExpertGroups, ExpertKind, ExpertPlan, ExpertRows,
    ExpertSpec, LeavingGroup, LeavingRows, RandomRouting, Routing, RoutingError, TokenRun,
};
pub use fingerprint::Fingerprint;
pub use gemm_collective::GemmCollective;
pub use group_part::{GroupPartError, SplitSide};
pub use hierarchy::{TwoLevelExchange, TwoLevelPart};
pub use hosting::{HostedRows, HostedWork, OffloadedRows, RowHosts};
pub use linear::{GROUP_TILE_COLUMNS, GROUP_TILE_ROWS, LinearPlan, WaveGroups};
pub use linear_spec::{Activations, LinearDirection, LinearKind, LinearSize, LinearSpec};
pub use outline::Outline;
pub use plan::{Plan, RankPlan, StagePlan};
pub use planning::{CancellationToken, Helpers, Planning};
pub use rank_outline::RankOutline;
pub use receive_order::MOST_LAYERS;
pub use row_list::RowList;
pub use runs::{Run, Runs};
pub use spec::{AttentionSpec, DType, GradientShares, HostedRowBytes};
pub use stage_cuts::StageCuts;
pub use summary::{CommSummary, PlanSummary, RankSummary, StageSummary};
pub use topology::Topology;
pub use transformer::{LayerLinear, TransformerSpec};

/// Rows of a key block, the step in which kernels loop over keys. Stages are cut only at multiples of it (counted along a
/// rank's received rows in their order), so that every kernel block, and with it every bit of a deterministic result, is the same for
/// any number of stages.
pub const KEY_BLOCK: usize = 128;
