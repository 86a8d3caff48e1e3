//! Rows of several ranks packed one after the other: what is sent and received where rows do not go straight to their place.

use counterpoint_exec::collective::PeerRows;
use counterpoint_mask::Range;

/// Every tensor begins at a multiple of this.
const ALIGNMENT: u64 = 256;

/// A packed buffer: tensor after tensor, of each tensor rank after rank, of each rank its rows in the order of the pattern.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Staging {
    /// Ranks in ascending order, the own one left out. Their rows are as many and as long as those of the pattern, and lie
    /// together.
    pub(super) peers: Vec<PeerRows>,
    /// Where each tensor begins, and the bytes of one of its rows.
    pub(super) tensors: Vec<(u64, u64)>,
    /// Of all.
    pub(super) bytes: u64,
}

impl Staging {
    /// Of the rows shared with `peers`, of tensors with rows of these many bytes. Rows of rank `own` are not packed.
    pub(super) fn new(peers: &[PeerRows], row_bytes: &[u64], own: usize) -> Self {
        let mut next = 0;
        let mut packed = |rows: &Range| {
            next += rows.len();
            Range::new(next - rows.len(), next)
        };
        let others = peers.iter().filter(|peer| peer.rank != own);
        let peers: Vec<PeerRows> = others
            .map(|peer| PeerRows { rank: peer.rank, rows: peer.rows.iter().map(&mut packed).collect() })
            .collect();
        let mut bytes = 0;
        let tensors = row_bytes.iter().map(|&row| {
            let begin = bytes;
            bytes = (bytes + next as u64 * row).next_multiple_of(ALIGNMENT);
            (begin, row)
        });
        let tensors = tensors.collect();
        Self { peers, tensors, bytes }
    }

    /// The rows of one rank; none when nothing is shared with it.
    pub(super) fn of(&self, rank: usize) -> &[Range] {
        self.peers.iter().find(|peer| peer.rank == rank).map_or(&[], |peer| &peer.rows)
    }

    /// (first byte, bytes) of each tensor's rows of one rank, where there are any.
    pub(super) fn spans(&self, rank: usize) -> Vec<(u64, u64)> {
        let rows = self.of(rank);
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Vec::new() };
        let span = |&(begin, row): &(u64, u64)| {
            (begin + first.start as u64 * row, (last.end - first.start) as u64 * row)
        };
        self.tensors.iter().map(span).filter(|&(_, bytes)| bytes > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_packed_in_order_and_the_own_are_left_out() {
        let peer = |rank, rows: &[(usize, usize)]| PeerRows {
            rank,
            rows: rows.iter().map(|&(start, end)| Range::new(start, end)).collect(),
        };
        let peers = [peer(0, &[(10, 13), (2, 4)]), peer(1, &[(0, 9)]), peer(3, &[(5, 6)])];
        let staging = Staging::new(&peers, &[100, 6], 1);
        assert_eq!(staging.peers, [peer(0, &[(0, 3), (3, 5)]), peer(3, &[(5, 6)])]);
        assert_eq!((&staging.tensors[..], staging.bytes), (&[(0, 100), (768, 6)][..], 1024));
        assert_eq!(staging.spans(0), [(0, 500), (768, 30)]);
        assert_eq!(staging.spans(3), [(500, 100), (798, 6)]);
        assert!(staging.of(1).is_empty() && staging.spans(1).is_empty());
    }
}
