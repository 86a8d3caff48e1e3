//! A group collective by peers: which rows go to whom and come from whom, read from a plan's `GroupPart`.

use counterpoint_mask::Range;
use counterpoint_plan::GroupPart;
use serde::{Deserialize, Serialize};

/// Rows shared with one rank, in the order in which both sides list them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerRows {
    /// The rank.
    pub rank: usize,
    /// The rows, no range empty.
    pub rows: Vec<Range>,
}

impl PeerRows {
    /// Number of rows.
    pub fn total(&self) -> usize {
        self.rows.iter().map(Range::len).sum()
    }
}

/// A [`GroupPart`] read in one direction: by peer, ascending, splits without rows left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern {
    /// Rows of the inputs that go to each peer.
    pub outgoing: Vec<PeerRows>,
    /// Rows of the outputs that come from each peer.
    pub incoming: Vec<PeerRows>,
}

impl Pattern {
    pub(super) fn of_cast(part: &GroupPart) -> Self {
        Self { outgoing: by_owned(part), incoming: by_remote(part) }
    }

    pub(super) fn of_reduce(part: &GroupPart) -> Self {
        Self { outgoing: by_remote(part), incoming: by_owned(part) }
    }

    /// What goes to `rank`; no rows when nothing does.
    pub fn to(&self, rank: usize) -> &[Range] {
        rows_of(&self.outgoing, rank)
    }

    /// The ranks on either side, ascending.
    pub fn peers(&self) -> Vec<usize> {
        let mut peers: Vec<usize> =
            self.incoming.iter().chain(&self.outgoing).map(|peer| peer.rank).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// What comes from `rank`.
    pub fn from(&self, rank: usize) -> &[Range] {
        rows_of(&self.incoming, rank)
    }
}

fn rows_of(peers: &[PeerRows], rank: usize) -> &[Range] {
    peers.binary_search_by_key(&rank, |peer| peer.rank).map_or(&[], |index| &peers[index].rows)
}

fn by_owned(part: &GroupPart) -> Vec<PeerRows> {
    group(part.owned.iter().flat_map(|split| split.ranks.iter().map(|&rank| (rank, split.rows))))
}

fn by_remote(part: &GroupPart) -> Vec<PeerRows> {
    group(part.remote.iter().map(|split| (split.rank, split.rows)))
}

/// By rank; of each in the order of the splits, which is what the two sides agree on.
fn group(splits: impl Iterator<Item = (u32, Range)> + Clone) -> Vec<PeerRows> {
    let splits = splits.filter(|(_, rows)| !rows.is_empty());
    let mut counts: Vec<usize> = Vec::new();
    for (rank, _) in splits.clone() {
        let rank = rank as usize;
        if rank >= counts.len() {
            counts.resize(rank + 1, 0);
        }
        counts[rank] += 1;
    }
    let with_room = |(rank, count): (usize, &usize)| PeerRows { rank, rows: Vec::with_capacity(*count) };
    let mut peers: Vec<PeerRows> = counts.iter().enumerate().map(with_room).collect();
    splits.for_each(|(rank, rows)| peers[rank as usize].rows.push(rows));
    peers.retain(|peer| !peer.rows.is_empty());
    peers
}
