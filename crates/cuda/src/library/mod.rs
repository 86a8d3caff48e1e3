//! Libraries that are opened at run time. Nothing is opened before it is asked for, and a library that is not there, or
//! lacks a function, is an error with a sentence, never a panic.

mod driver;
mod nccl;
mod nvrtc;
mod search;
mod table;

pub(crate) use driver::{Driver, call};
pub use nccl::{LibraryVersion, nccl_version};
pub(crate) use nvrtc::Nvrtc;
pub(crate) use search::{NCCL_VARIABLE, NVRTC_VARIABLE, SEARCH_VARIABLES, find_program};
