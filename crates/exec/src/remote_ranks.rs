//! The ranks of a world that are other processes, and what they say of themselves.

use serde::{Deserialize, Serialize};

use crate::ExecError;

/// What a rank says of itself to one that waits for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankActivity {
    /// In words: ``stream compute has been in `attention` (stage 1) for 2.0 s``.
    pub doing: String,
    /// The rank that it waits for itself.
    pub waits_for: Option<usize>,
}

/// The ranks of a world that are other processes.
pub(crate) trait RemoteRanks: Send + Sync {
    /// The only rank that is in this process.
    fn rank(&self) -> usize;

    /// Notifies all others of this process's first error.
    fn notify(&self, error: &ExecError);

    /// What another rank is doing; `None` when its process does not answer.
    fn activity_of(&self, rank: usize) -> Option<RankActivity>;
}
