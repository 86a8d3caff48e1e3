//! What says whether a result is right: dense attention, linear layers and layers of experts by their definition in f64, the comparisons
//! of results with them, and the self-test that gives random problems to a device.
//!
//! [`check_attention`], [`check_linear`] and [`check_experts`] compare the results of whole problems, [`check_sample`] those of some rows
//! of a long sequence. Bounds come from the types, from the sizes of the sums, and for bf16 and f16 from what a plain implementation in
//! that type would give ([`plain_attention`]). The reference shares no arithmetic with the kernels that it judges.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod attention;
mod check;
mod draw;
mod experts;
mod linear;
mod normalised;
mod rms_norm;
pub mod selftest;
mod wrong_result;

pub use attention::{
    NoiseNorms, Reference, ReferenceGradients, Sample, plain_attention, reference_attention, reference_bytes,
};
pub use check::{
    CheckReport, RelativeTo, TensorCheck, check_attention, check_sample, compare_with_reference,
};
pub use draw::Draw;
pub use experts::check_experts;
pub use linear::{LinearSample, SumRounding, check_linear, check_linear_part, half_unit};
pub use normalised::{NormalisedInputs, NormalisedReference, reference_normalised};
pub use rms_norm::{NormGradients, NormalisedRows, check_rms_norm, check_rms_norm_backward};
pub use wrong_result::WrongResult;
