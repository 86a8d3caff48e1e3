//! Which query row sees which key column.
//!
//! A [`Mask`] is a list of [`AttnSlice`]s: rectangles of the (query, key) plane, each with a [`MaskType`]. Inside the
//! planner and the kernels the same thing is held as [`Band`]s, the form that cutting leaves closed.
//!
//! This crate is pure: no device, clock, environment, file or thread count.

mod band;
mod error;
mod mask;
mod range;
mod slice;

pub use band::Band;
pub use error::MaskError;
pub use mask::Mask;
pub use range::Range;
pub use slice::{AttnSlice, MaskType};
