//! Choices by prediction: candidates are lowered and simulated, and the one that is predicted to end first is kept.
//!
//! Pure, as the crates below it: no device, clock, environment or file. Everything that a default does not name is chosen here,
//! and what was chosen says by how much.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod closed_form;
mod config;
mod device_model;
mod dispatch;
mod error;
mod experts;
mod hosted_cost;
mod hosts;
mod linear;
mod overview;
mod owners;
mod pass_stages;
mod planner;
mod policies;
mod prediction;
mod receive_layers;
mod remembered;
mod stages;
mod training_step;
mod tuned;
mod whole_work;

pub use closed_form::{Prediction, RankPrediction, StagePrediction};
pub use config::{DispatchAlgorithm, MAX_CHUNKS, MAX_CP_SIZE, PlanConfig, QueryExchange};
pub use device_model::{DEVICE_MODEL_VERSION, DeviceModel};
pub use dispatch::{
    DISPATCHES, DispatchCandidate, DispatchChoice, MOST_COMPARED_RANKS, modelled_transports, plan_attention,
};
pub use error::{ChooseError, ConfigError};
pub use experts::{ExpertCandidate, ExpertChoice, ExpertDirection, expert_pass, expert_programs};
pub use hosts::UnweighedOffload;
pub use linear::{
    ClockError, GemmExchange, GemmExchangeSeconds, GroupSearcher, LayerGroups, LinearMachine, LinearPass,
    LinkUse, Offered, PassClock, PassCosts, PassCurves, ProductStart, SearchStep, SimulatedClock,
    compositions,
};
pub use overview::PlanOverview;
pub use owners::{dispatch, dispatch_keys, dispatch_queries};
pub use pass_stages::{MAX_STAGES, PassStages, StageCount};
pub use planner::{
    plan_cross_attention, plan_mask, plan_mask_on, plan_mask_within, plan_rank, plan_stages_within,
};
pub use policies::{PassChoice, PolicyCandidate, PolicyChoice, attention_policies};
pub use prediction::AttentionPrediction;
pub use training_step::{LayerPart, LayerPrediction, Parallelism, StepError, StepPrediction, StepSpec};
pub use tuned::{
    GroupSearch, TUNING_VERSION, Tuned, TunedExpertShape, TunedExperts, TunedGroups, TunedHere, TunedList,
    TunedPass, TunedPlace, TunedPlans, TunedShape, TunedSizes, TuningError,
};
