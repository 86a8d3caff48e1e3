//! How long things take, always on results that are checked: the CPU's kernels and matrix products, what work costs on this machine,
//! and linear layers, their parts and collectives on the ranks of any [`Machine`](counterpoint_exec::Machine).
//!
//! [`calibrate`] fills a cost model for the CPU, [`MeasuredClock`] gives the search for a layer's groups its times.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod attention;
mod calibrate;
mod clock;
mod collective_shape;
mod contents;
mod processes;
mod timed;

pub use attention::{AttentionBench, Rate, Seconds, bench_attention};
pub use calibrate::calibrate;
pub use clock::{MeasureError, MeasuredClock};
pub use collective_shape::CollectiveShape;
pub use processes::Processes;
pub use timed::Repeats;
