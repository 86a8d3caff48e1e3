//! The runtime without attention: group collectives, streams, the interpreter, faults.
#![allow(clippy::unwrap_used)]

mod collectives;
mod errors;
mod faults;
mod overlap;
mod pattern;
mod programs;
