//! Libraries that are opened at run time. Nothing is opened before it is asked for, and a library that is not there, or
//! lacks a function, is an error with a sentence, never a panic.

mod driver;
mod nvrtc;
mod search;
mod table;

pub(crate) use driver::{Driver, call};
pub(crate) use nvrtc::Nvrtc;
pub(crate) use search::SEARCH_VARIABLES;
