//! Which query row sees which key column.
//!
//! A [`Mask`] is a list of [`AttnSlice`]s: rectangles of the (query, key) plane, each with a [`MaskType`]. Inside the
//! planner and the kernels the same thing is held as [`Band`]s, the form that cutting leaves closed.
//!
//! This crate is pure: no device, clock, environment, file or thread count.

mod band;
mod builder;
mod documents;
mod error;
pub mod expression;
mod json;
mod mask;
mod overlap;
mod range;
mod raster;
mod slice;

pub use band::Band;
pub use builder::Window;
pub use documents::Documents;
pub use error::MaskError;
pub use mask::{MAX_SEQLEN, Mask};
pub use range::Range;
pub use raster::{PictureStyle, Raster};
pub use slice::{AttnSlice, MaskType};
