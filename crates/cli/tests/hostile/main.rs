//! What the program does among hostile users, damaged files and machines at their limits.

mod current_folder;
mod files;
mod fuzz;
mod limits;
mod ranks;
mod terminal;
mod tune;

/// The binary in a fresh folder, as the other tests run it.
#[path = "../cli/support/mod.rs"]
#[allow(dead_code)]
mod support;
