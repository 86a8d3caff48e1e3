//! The files of a machine: read with limits, written whole or not at all, locked, trusted by their owner, and found by absolute
//! paths only.
//!
//! It knows nothing of masks, plans or kernels. Which files a command reads and where a cache lies is decided above it.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod child;
mod error;
mod identity;
mod lock;
mod read;
mod search;
mod trusted;
mod write;

pub use child::{ChildError, output_of};
pub use error::WriteError;
pub use identity::FileId;
pub use lock::{FileLock, LockError};
pub use read::{OpenFile, ReadError, ReadLimits};
pub use search::{
    NoProgram, RelativeFolder, absolute_entries, command, folder_in_home, folder_named, program,
    temporary_folder,
};
pub use trusted::{DistrustError, Owners, TrustedFolder};
pub use write::{AtomicFiles, Destination, check_writable, write_atomically};
