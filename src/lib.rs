//! Counterpoint: an engine in which computation and communication play at the same time.
//!
//! This crate gathers the others under one name; read them in the order in which data flows:
//! [`mask`] (what), [`plan`] (who), [`schedule`] (when), [`exec`] (done; on GPUs [`cuda`]), [`report`] (shown).

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

pub use counterpoint_cuda as cuda;
pub use counterpoint_exec as exec;
pub use counterpoint_mask as mask;
pub use counterpoint_plan as plan;
pub use counterpoint_report as report;
pub use counterpoint_schedule as schedule;
