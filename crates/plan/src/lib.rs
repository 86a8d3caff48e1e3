//! From a mask to who computes what and who sends what.
//!
//! Pure and deterministic: the same input gives the same plan on every rank, so no rank tells another its plan.

mod assign;
mod config;
mod cost;
mod dispatch;
mod error;
mod exchange;
mod layout;
mod outline;
mod piece;
mod plan;
mod runs;
mod spec;
mod stages;
mod topology;
mod work;

pub use config::{MAX_CP_SIZE, MAX_STAGES, PlanConfig, StageCount};
pub use cost::{CostModel, Link};
pub use dispatch::{
    ChunkWork, Dispatch, DispatchAlgorithm, chunk_work, dispatch, dispatch_keys, dispatch_queries,
    received_rows,
};
pub use error::PlanError;
pub use exchange::{GroupPart, OwnedSplit, RemoteSplit};
pub use plan::{Plan, RankPlan, StagePlan, plan_rank};
pub use spec::{AttentionSpec, DType};
pub use topology::Topology;

/// Rows of a key block, the step in which kernels walk keys. Stages are cut only at multiples of it (counted along a
/// rank's received rows), so that every kernel block, and with it every bit of a deterministic result, is the same for
/// any number of stages.
pub const KEY_BLOCK: usize = 128;
