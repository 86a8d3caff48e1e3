//! What work costs on a machine: its rates and links, what its kernels take by the tiles that they compute, and what was measured of it.
//!
//! Pure figures and formulas. Which of them hold for a device is chosen above, as is what follows from them.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod attention;
mod attention_work;
mod error;
mod figure_limits;
mod machine_profile;
mod model;
mod ready_work;
mod tile_costs;
mod worker_sharing;

pub use attention_work::AttentionWork;
pub use counterpoint_tiles::Interruption;
pub use counterpoint_tiles::gemm::ProblemSize;
pub use error::CostError;
pub use machine_profile::{
    LinkPoint, MachineProfile, PROFILE_VERSION, PolicyMeasurement, ProfileError, TransportMeasurement,
};
pub use model::{CostModel, Link};
pub use ready_work::ReadyWork;
pub use tile_costs::{TileCost, TileCosts, TileShape};
pub use worker_sharing::WorkerSharing;
