//! Query/output exchange: the work of some query rows is done where their keys are.
//!
//! A row that sees many keys of many ranks makes its owner fetch them all, and compute with them all. Its query and its
//! partial results are few bytes compared with these keys. So such a row can be *offloaded*: every rank that owns keys that it sees, its
//! owner included, *hosts* it. Hosts receive its query, compute with their own keys, and send partial results to the owner. A row is
//! offloaded with all of its work, so results of a row come from stages or from hosts, never from both: its partial results are
//! merged once, in the order of ranks, and no stage waits for them.

mod assign;
mod pieces;

use std::sync::Arc;

use counterpoint_mask::{Band, Range};
use serde::{Deserialize, Serialize};

use crate::{GroupPart, OwnedSplit};

pub(crate) use assign::assign;
pub(crate) use pieces::pieces;

/// By rank: offloaded local query rows, merged and ascending.
pub type OffloadedRows = Vec<Vec<Range>>;

/// One rank's part in the work that is done where keys are; the same in the forward and in the backward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostedWork {
    /// This rank's part in the group-cast of queries: `owned` rows are its offloaded local query rows, `remote` rows are
    /// rows of the buffer of hosted queries. A rank that hosts rows of its own sends them to itself.
    pub part: GroupPart,
    /// Global query rows that it hosts, in the order of the buffer: ascending.
    pub q_ranges: Vec<Range>,
    /// Rows of the buffer of hosted queries.
    pub q_rows: usize,
    /// The work: rows are rows of that buffer, columns are the rank's local key rows. Sorted.
    pub bands: Arc<[Band]>,
    /// Unmasked pairs.
    pub area: u64,
}

impl HostedWork {
    /// The rank's offloaded local query rows, merged and ascending.
    pub fn offloaded(&self) -> Vec<Range> {
        Range::merged(self.part.owned.iter().map(|split| split.rows).collect())
    }

    /// Number of [offloaded](Self::offloaded) rows.
    pub fn offloaded_rows(&self) -> usize {
        self.part.owned.iter().map(|split| split.rows.len()).sum()
    }

    /// This rank's part in the group-reduce that brings partial results to their owners: as [`part`](Self::part), but `owned` rows are
    /// places in the list of [offloaded](Self::offloaded) rows, whose results lie one after the other.
    pub fn owner_part(&self) -> GroupPart {
        let mut place = 0;
        // A sweep in global order wrote the splits: they ascend and share no row.
        let owned = self.part.owned.iter().map(|split| {
            place += split.rows.len();
            OwnedSplit { rows: Range::new(place - split.rows.len(), place), ranks: split.ranks.clone() }
        });
        GroupPart { owned: owned.collect(), remote: self.part.remote.clone() }
    }

    /// Query rows that `rank`, whose part it is, receives from other ranks.
    pub fn recv_rows(&self, rank: usize) -> u64 {
        let others = self.part.remote.iter().filter(|split| split.rank as usize != rank);
        others.map(|split| split.rows.len() as u64).sum()
    }

    /// Query rows that `rank`, whose part it is, sends to other ranks, each counted once per destination.
    pub fn send_rows(&self, rank: usize) -> u64 {
        let others = |ranks: &[u32]| ranks.iter().filter(|&&other| other as usize != rank).count();
        self.part.owned.iter().map(|split| (split.rows.len() * others(&split.ranks)) as u64).sum()
    }
}
