//! Which query row sees which key column.
//!
//! A [`Mask`] is a list of [`AttnSlice`]s: rectangles of the (query, key) plane, each with a [`MaskType`]. Inside the
//! planner and the kernels the same thing is held as [`Band`]s, the form that cutting leaves closed.
//!
//! ```
//! use counterpoint_mask::{Mask, Range};
//!
//! let mask: Mask = "sliding-window:8k,left=1023,right=0".parse()?;
//! assert_eq!(mask.slices().len(), 2);
//! // The keys that rows 4096..5120 need, to the token.
//! let rows = Range::new(4096, 5120);
//! let keys = mask.bands().map(|band| band.clip(&rows, &Range::new(0, 8192)).keys()).collect();
//! assert_eq!(Range::merged(keys), [Range::new(3073, 5120)]);
//! # Ok::<(), counterpoint_mask::MaskError>(())
//! ```
//!
//! This crate is pure: no device, clock, environment, file or thread count.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod band;
mod builder;
mod documents;
mod error;
pub mod expression;
mod json;
mod mask;
mod order;
mod overlap;
mod preset;
mod range;
mod raster;
mod slice;

pub use band::Band;
pub use builder::Window;
pub use documents::Documents;
pub use error::{ExpressionFault, MaskError};
pub use json::MASK_SCHEMA;
pub use mask::{MAX_SEQLEN, Mask};
pub use preset::{MaskPreset, PACKED_DOCUMENTS};
pub use range::Range;
pub use raster::{PictureStyle, Raster};
pub use slice::{AttnSlice, MaskType};
