//! The runtime without attention: group collectives, streams, the interpreter, faults.

mod collectives;
mod errors;
mod faults;
mod overlap;
mod pattern;
mod profiler;
mod programs;
