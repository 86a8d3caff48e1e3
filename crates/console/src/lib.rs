//! What all commands of the `counterpoint` binary share: printing, errors with their exit status, progress, arguments, files,
//! interruption, processes of their own, and the ranks that `--device` names.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

pub mod arguments;
mod check_fault;
mod command_line;
mod console;
pub mod device;
pub mod digest;
mod error;
pub mod files;
mod flag_fault;
mod given;
pub mod input;
mod input_fault;
pub mod interrupt;
pub mod launched;
pub mod mask_argument;
pub mod nodes;
pub mod origin;
pub mod output;
pub mod overlap;
mod own_process;
mod peers_fault;
pub mod prediction;
pub mod profile;
pub mod program;
mod progress;
pub mod rank_machine;
mod schema;
pub mod solution;
mod temporary_folder;
pub mod tuned;
mod usage_fault;

pub use check_fault::{CheckFault, ChildFault, EarlyStarts, PyTorchFault};
pub use command_line::{CommandLine, Flag};
pub use console::{
    count, note, note_cache_warnings, note_development_build, note_error, note_waiting, print, print_folded,
    print_json, stages, style,
};
pub use error::CliError;
pub use flag_fault::FlagFault;
pub use given::{RESULTS as FLAGS_OF_RESULTS, facets};
pub use input_fault::{EntryFault, FileFault, InputFault};
pub use own_process::OwnProcess;
pub use peers_fault::PeersFault;
pub use progress::{Bar, Progress, Ticker};
pub use schema::{Documented, Schema};
pub use temporary_folder::TemporaryFolder;
pub use usage_fault::UsageFault;
