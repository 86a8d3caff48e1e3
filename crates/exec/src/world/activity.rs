//! What ranks are doing, asked by and of other processes.

use std::sync::Arc;

use super::{Blocker, StreamStatus, World};
use crate::RankActivity;
use crate::remote_ranks::RemoteRanks;

impl World {
    /// What `rank` is doing, for those of other processes that wait for it.
    pub(crate) fn activity_of(&self, rank: usize) -> RankActivity {
        let mut visited: Vec<Arc<StreamStatus>> = Vec::new();
        let mut stream = self.holding_stream(rank);
        while let Some(current) =
            stream.filter(|stream| !visited.iter().any(|seen| Arc::ptr_eq(seen, stream)))
        {
            match current.blocker() {
                Some(Blocker::Rank(other)) => {
                    return RankActivity { doing: current.describe(), waits_for: Some(other) };
                }
                Some(Blocker::Stream(next)) => stream = Some(next),
                None => return RankActivity { doing: current.describe(), waits_for: None },
            }
            visited.push(current);
        }
        RankActivity { doing: self.activity(rank), waits_for: None }
    }

    /// Follows the chain of waits from `rank`, which is in another process.
    pub(crate) fn remote_culprit(&self, remote: &dyn RemoteRanks, mut rank: usize) -> (usize, String) {
        let mut visited = Vec::new();
        loop {
            let activity = match rank == remote.rank() {
                true => Some(self.activity_of(rank)),
                false => remote.activity_of(rank),
            };
            let Some(RankActivity { doing, waits_for }) = activity else {
                return (rank, "its process does not answer".to_owned());
            };
            visited.push(rank);
            match waits_for {
                Some(next) if visited.contains(&next) => {
                    return (rank, format!("in a circle of waits: {doing}"));
                }
                Some(next) => rank = next,
                None => return (rank, doing),
            }
        }
    }
}
