//! What each CTA of a matrix product does: tiles of D two to a unit, the parts of k, and the order in which units are begun.

mod layout;
mod order;
mod problem_size;
mod shape;

pub use layout::GemmLayout;
pub use order::{GemmUnit, OrderError, TOGETHER_ROWS, TileOrder, UnitGrid, group, units};
pub use problem_size::ProblemSize;
pub use shape::{BLOCK, GemmShape, TILE_ROWS, TilePair, Warpgroups};
