use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

/// Rows that this rank owns and the ranks that hold copies or partials of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OwnedSplit {
    /// Rows of the owner's tensor.
    pub rows: Range,
    /// The other side: destinations of a group-cast, sources of a group-reduce. Ascending, no rank twice.
    pub ranks: Vec<u32>,
}

/// Rows that another rank owns, as they lie in this rank's buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteSplit {
    /// Rows of this rank's buffer.
    pub rows: Range,
    /// The owner: source of a group-cast, destination of a group-reduce.
    pub rank: u32,
}

/// One rank's part in a group collective. A group-cast moves rows from `owned` to `remote`, a group-reduce brings
/// partial results of `remote` back to `owned`; one pattern serves both.
///
/// The splits that two ranks share match in order: the remote splits of `r` that name owner `s`, taken in the order of
/// the list, have the lengths of the owned splits of `s` that name `r`, in the order of that list. Owned splits may share
/// rows as long as no rank is named twice for a row; remote splits never share rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupPart {
    /// Own rows that others hold.
    pub owned: Vec<OwnedSplit>,
    /// Others' rows that this rank holds.
    pub remote: Vec<RemoteSplit>,
}

impl GroupPart {
    /// Rows that a group-cast sends, each counted once per destination.
    pub fn send_rows(&self) -> u64 {
        self.owned.iter().map(|split| (split.rows.len() * split.ranks.len()) as u64).sum()
    }

    /// Rows that a group-cast receives.
    pub fn recv_rows(&self) -> u64 {
        self.remote.iter().map(|split| split.rows.len() as u64).sum()
    }

    /// Several parts as one: the remote buffers laid one after the other, `remote_rows` rows each; own rows unchanged.
    pub fn concat<'a>(parts: impl IntoIterator<Item = (&'a GroupPart, usize)>) -> GroupPart {
        let mut out = GroupPart::default();
        let mut offset = 0;
        for (part, remote_rows) in parts {
            out.owned.extend_from_slice(&part.owned);
            out.remote.extend(part.remote.iter().map(|split| RemoteSplit {
                rows: Range::new(split.rows.start + offset, split.rows.end + offset),
                rank: split.rank,
            }));
            offset += remote_rows;
        }
        out
    }

    /// Whether this rank neither sends nor receives.
    pub fn is_empty(&self) -> bool {
        self.owned.is_empty() && self.remote.is_empty()
    }
}
