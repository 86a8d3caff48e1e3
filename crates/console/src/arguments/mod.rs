//! Arguments that several commands take, and the parsers of their values.
//!
//! Every value that is a number may begin with a hyphen: its parser then refuses `-1` with the flag's name and the range,
//! where clap by itself would take it for an unknown argument.

pub mod overlap;
mod planning;
mod ranks;
pub mod value;
mod value_fault;

pub use overlap::{OverlapChoice, OverlapList, PassOverlaps};
pub use planning::{PlanningArguments, ShapeArguments};
pub use ranks::{Device, Exchange};
pub use value::{DISPATCHES, DispatchAsked, dispatch_name, dtype_name, scale_of};
pub use value_fault::ValueFault;
