//! A selftest: random attention problems and linear layers on a device, against f64.
//!
//! A device is a [`Subject`]; the problems are the same for every one, so the CPU's proof and the GPU's are one code. The
//! references, which cost far more than the runs, are computed on all cores while the device works.

mod case;
mod collectives;
mod examine;
mod experts;
mod linear;
mod pattern;
mod random_mask;
mod rms_norm;
mod share;
mod soak;
#[cfg(test)]
mod spoiled;
mod subject;

pub use case::{Case, Extent};
pub use collectives::selftest_collectives;
pub use examine::{SelfCheck, selftest_attention, unlike_elements};
pub use experts::selftest_experts;
pub use linear::selftest_linear;
pub use rms_norm::selftest_rms_norm;
pub use share::{Share, ShareError};
pub use soak::Soak;
pub use subject::{CpuSubject, Subject, SubjectError, run_alone};
