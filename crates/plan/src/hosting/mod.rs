//! Query/output exchange: the work of some query rows is done where their keys are.
//!
//! A row that sees many keys of many ranks makes its owner fetch them all, and compute with them all. Its query and its
//! partial results are few bytes compared with these keys. So such a row can be *offloaded*: every rank that owns keys that it sees, its
//! owner included, *hosts* it. Hosts receive its query, compute with their own keys, and send partial results to the owner. These are
//! merged once, in the order of ranks, and no stage waits for them.
//!
//! A row may also be offloaded in part: some owners of its keys host it, and its owner computes with the keys of the others, its own among them,
//! in stages. What stages have computed is merged first.

mod assign;
mod pieces;

use std::sync::Arc;

use counterpoint_mask::{Band, Range};
use serde::{Deserialize, Serialize};

use crate::{GroupPart, OwnedSplit};

pub(crate) use assign::assign;
pub(crate) use pieces::pieces;

/// By rank: local query rows that are offloaded with all of their work, merged and ascending.
pub type OffloadedRows = Vec<Vec<Range>>;

/// Neighbouring local query rows of a rank, and which owners of their keys compute for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostedRows {
    /// Local query rows.
    pub rows: Range,
    /// Who computes.
    pub hosts: RowHosts,
}

/// Which owners of keys compute for rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowHosts {
    /// All of them, the rows' own rank among them.
    All,
    /// These ranks, ascending. The rows' own rank computes with all other keys.
    These(Vec<u32>),
}

impl RowHosts {
    /// Whether `rank`, which owns keys that the rows see, computes for them.
    pub(crate) fn has(&self, rank: u32) -> bool {
        match self {
            Self::All => true,
            Self::These(ranks) => ranks.binary_search(&rank).is_ok(),
        }
    }
}

impl HostedRows {
    /// These rows of each rank, hosted by all owners of their keys.
    pub fn by_all(offloaded: &OffloadedRows) -> Vec<Vec<Self>> {
        let of_rank =
            |rows: &Vec<Range>| rows.iter().map(|&rows| Self { rows, hosts: RowHosts::All }).collect();
        offloaded.iter().map(of_rank).collect()
    }
}

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

    /// The rank's offloaded local query rows, with their hosts.
    pub fn hosted_rows(&self) -> Vec<HostedRows> {
        let splits = self.part.owned.iter();
        splits
            .map(|split| HostedRows { rows: split.rows, hosts: RowHosts::These(split.ranks.clone()) })
            .collect()
    }

    /// Whether some of `bands`, whose rows are the rank's local ones and which it computes itself, have offloaded rows.
    pub fn is_in_part<'a>(&self, mut bands: impl Iterator<Item = &'a Band>) -> bool {
        let offloaded = self.offloaded();
        let is_offloaded = |rows: &Range| {
            let at = offloaded.partition_point(|offloaded| offloaded.end <= rows.start);
            offloaded.get(at).is_some_and(|offloaded| offloaded.start < rows.end)
        };
        !offloaded.is_empty() && bands.any(|band| is_offloaded(&band.q_range))
    }

    /// Number of [offloaded](Self::offloaded) rows.
    pub fn offloaded_rows(&self) -> usize {
        self.part.owned.iter().map(|split| split.rows.len()).sum()
    }

    /// This rank's part in the group-reduce that brings partial results to their owners: as [`part`](Self::part), but `owned` rows are
    /// places in the list of [offloaded](Self::offloaded) rows, whose results lie one after the other.
    pub fn owner_part(&self) -> GroupPart {
        self.with_places(&self.part)
    }

    /// One step of that exchange, of which `owned` are offloaded rows, as the group-reduce that brings partial results to their places. Places
    /// to which the step brings nothing are named with no rank.
    pub fn with_places(&self, step: &GroupPart) -> GroupPart {
        let (mut place, mut of_step) = (0, step.owned.iter().peekable());
        // A sweep in global order wrote the splits of both: they ascend and share no row, and steps have those of the whole.
        let owned = self.part.owned.iter().map(|split| {
            place += split.rows.len();
            let ranks = of_step
                .next_if(|step| step.rows == split.rows)
                .map_or_else(Vec::new, |step| step.ranks.clone());
            OwnedSplit { rows: Range::new(place - split.rows.len(), place), ranks }
        });
        let owned = owned.collect();
        debug_assert!(of_step.next().is_none(), "a step of another exchange");
        GroupPart { owned, remote: step.remote.clone() }
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
