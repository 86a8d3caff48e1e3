//! Plans as they are chosen for masks: what every one must hold, on random masks and configurations, and what is built around them.

mod bounds;
mod cases;
#[path = "../../../plan/tests/checks/mod.rs"]
mod checks;
mod dispatch;
mod fingerprint;
mod hierarchy;
mod hosting;
mod plan;
mod planning;
mod report;
