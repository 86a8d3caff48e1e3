//! Building a [`GroupPart`] from what a caller knows, and checking one.

use std::fmt;

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{GroupPart, OwnedSplit, RemoteSplit};

/// The two kinds of splits of a [`GroupPart`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SplitSide {
    /// Rows that the rank owns.
    Owned,
    /// Rows of other ranks.
    Remote,
}

impl fmt::Display for SplitSide {
    /// `owned` or `remote`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Owned => "owned",
            Self::Remote => "remote",
        })
    }
}

/// Why a [`GroupPart`] makes no sense on its rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum GroupPartError {
    /// A split reaches past its tensor.
    #[error("{side} split {index} is rows {start}..{end} of a tensor of {rows} rows; shorten the split")]
    PastTheTensor {
        /// Which of the two kinds of splits.
        side: SplitSide,
        /// Index of the split.
        index: usize,
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// Rows of the tensor.
        rows: usize,
    },
    /// A split's range ends before it begins.
    #[error("{side} split {index} is rows {start}..{end}: it ends before it begins")]
    Reversed {
        /// Which of the two kinds of splits.
        side: SplitSide,
        /// Index of the split.
        index: usize,
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
    },
    /// A rank that does not exist.
    #[error("{side} split {index} names rank {rank}; there are ranks 0 to {last}", last = world_size - 1)]
    UnknownRank {
        /// Which of the two kinds of splits.
        side: SplitSide,
        /// Index of the split.
        index: usize,
        /// The rank.
        rank: u32,
        /// Number of ranks.
        world_size: usize,
    },
    /// The ranks of a split are not ascending, or one is there twice.
    #[error(
        "owned split {index} names rank {second} after rank {first}; name each rank once, in ascending order"
    )]
    UnorderedRanks {
        /// Index of the split.
        index: usize,
        /// A rank.
        first: u32,
        /// The one after it.
        second: u32,
    },
    /// Two remote splits share rows.
    #[error("two remote splits share row {row}; each row of the buffer has one owner")]
    RemoteOverlap {
        /// The row.
        row: usize,
    },
    /// Two owned splits give one row to one rank.
    #[error("two owned splits give row {row} to rank {rank}; a row goes to a rank once")]
    OwnedTwice {
        /// The row.
        row: usize,
        /// The rank.
        rank: u32,
    },
    /// What a rank sends to itself is not what it expects from itself.
    #[error("rank {rank} gives itself splits of {sent:?} rows and expects {expected:?} of itself")]
    SelfMismatch {
        /// The rank.
        rank: usize,
        /// Lengths of its own splits that name itself.
        sent: Vec<usize>,
        /// Lengths of its remote splits that name itself.
        expected: Vec<usize>,
    },
}

impl GroupPart {
    /// A part from splits given by length: `input` lies one after the other in the owned tensor, `output` one after the
    /// other, in any order that the caller likes, in the remote one. For a group-cast they are (length, destinations) and
    /// (length, source); for a group-reduce pass (length, sources) of the result as `input` and (length, destination) of
    /// the partial results as `output`. Destinations may be in any order and empty.
    pub fn from_splits<'a>(
        input: impl IntoIterator<Item = (usize, &'a [u32])>,
        output: impl IntoIterator<Item = (usize, u32)>,
    ) -> Self {
        let mut end = 0;
        let mut next = |length: usize| {
            end += length;
            Range::new(end - length, end)
        };
        let owned = input.into_iter().map(|(length, ranks)| {
            let (rows, mut ranks) = (next(length), ranks.to_vec());
            ranks.sort_unstable();
            OwnedSplit { rows, ranks }
        });
        let owned = owned.collect();
        let mut end = 0;
        let remote = output.into_iter().map(|(length, rank)| {
            end += length;
            RemoteSplit { rows: Range::new(end - length, end), rank }
        });
        Self { owned, remote: remote.collect() }
    }

    /// `rank`'s part in an all-gather of `lengths[r]` rows of every rank `r`, its own included. Mirrored, a
    /// reduce-scatter.
    pub fn all_gather_v(rank: usize, lengths: &[usize]) -> Self {
        let everyone: Vec<u32> = (0..lengths.len() as u32).collect();
        Self::from_splits([(lengths[rank], &everyone[..])], lengths.iter().copied().zip(0..))
    }

    /// `rank`'s part in an all-to-all in which rank `s` sends `lengths[s][d]` rows to rank `d`.
    pub fn all_to_all_v(rank: usize, lengths: &[Vec<usize>]) -> Self {
        let everyone: Vec<u32> = (0..lengths.len() as u32).collect();
        let input =
            lengths[rank].iter().zip(&everyone).map(|(&length, rank)| (length, std::slice::from_ref(rank)));
        Self::from_splits(input, lengths.iter().map(|row| row[rank]).zip(0..))
    }

    /// `rank`'s part in a broadcast of `length` rows of `root` to every one of `world_size` ranks, itself included.
    /// Mirrored, a reduction to `root`.
    pub fn broadcast(rank: usize, world_size: usize, root: usize, length: usize) -> Self {
        let everyone: Vec<u32> = (0..world_size as u32).collect();
        let input = (rank == root).then_some((length, &everyone[..]));
        Self::from_splits(input, [(length, root as u32)])
    }

    /// `rank`'s part in a scatter of `lengths[r]` rows of `root` to every rank `r`. Mirrored, a gather to `root`.
    pub fn scatter_v(rank: usize, root: usize, lengths: &[usize]) -> Self {
        let everyone: Vec<u32> = (0..lengths.len() as u32).collect();
        let pieces =
            lengths.iter().zip(&everyone).map(|(&length, rank)| (length, std::slice::from_ref(rank)));
        let input = pieces.filter(|_| rank == root);
        Self::from_splits(input, [(lengths[rank], root as u32)])
    }

    /// What of the part is shared with the ranks that `wanted` picks; rows stay where they are.
    #[must_use]
    pub fn shared_with(&self, wanted: impl Fn(usize) -> bool) -> Self {
        let wanted = |rank: u32| wanted(rank as usize);
        let owned = self.owned.iter().map(|split| OwnedSplit {
            rows: split.rows,
            ranks: split.ranks.iter().copied().filter(|rank| wanted(*rank)).collect(),
        });
        let remote = self.remote.iter().filter(|split| wanted(split.rank)).cloned();
        Self { owned: owned.collect(), remote: remote.collect() }
    }

    /// Checks the part on `rank` of `world_size`, whose owned tensor has `owned_rows` rows and whose remote one
    /// `remote_rows`. What it needs of other ranks' parts can only be checked when they are compared.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn check(
        &self,
        rank: usize,
        world_size: usize,
        owned_rows: usize,
        remote_rows: usize,
    ) -> Result<(), GroupPartError> {
        for (index, split) in self.owned.iter().enumerate() {
            check_rows(SplitSide::Owned, index, split.rows, owned_rows)?;
            for pair in split.ranks.windows(2) {
                if pair[0] >= pair[1] {
                    return Err(GroupPartError::UnorderedRanks { index, first: pair[0], second: pair[1] });
                }
            }
            for &rank in &split.ranks {
                check_rank(SplitSide::Owned, index, rank, world_size)?;
            }
        }
        for (index, split) in self.remote.iter().enumerate() {
            check_rows(SplitSide::Remote, index, split.rows, remote_rows)?;
            check_rank(SplitSide::Remote, index, split.rank, world_size)?;
        }
        if let Some(row) = shared_row(self.remote.iter().map(|split| split.rows)) {
            return Err(GroupPartError::RemoteOverlap { row });
        }
        let has_rows = |rows: &Range| !rows.is_empty();
        let to_self = |split: &&OwnedSplit| split.ranks.binary_search(&(rank as u32)).is_ok();
        let sent = self.owned.iter().filter(to_self).map(|split| split.rows).filter(has_rows);
        let from_self = self.remote.iter().filter(|split| split.rank as usize == rank);
        let expected = from_self.map(|split| split.rows).filter(has_rows);
        let length = |rows: Range| rows.len();
        if !sent.clone().map(length).eq(expected.clone().map(length)) {
            let (sent, expected) = (sent.map(length).collect(), expected.map(length).collect());
            return Err(GroupPartError::SelfMismatch { rank, sent, expected });
        }
        // Splits that follow each other, as nearly all do, share no row.
        let follows = |pair: &[OwnedSplit]| pair[0].rows.end <= pair[1].rows.start || pair[1].rows.is_empty();
        if self.owned.windows(2).all(follows) {
            return Ok(());
        }
        for rank in 0..world_size as u32 {
            let given = self.owned.iter().filter(|split| split.ranks.binary_search(&rank).is_ok());
            if let Some(row) = shared_row(given.map(|split| split.rows)) {
                return Err(GroupPartError::OwnedTwice { row, rank });
            }
        }
        Ok(())
    }
}

fn check_rows(side: SplitSide, index: usize, range: Range, rows: usize) -> Result<(), GroupPartError> {
    let Range { start, end } = range;
    if end < start {
        return Err(GroupPartError::Reversed { side, index, start, end });
    }
    if end > rows {
        return Err(GroupPartError::PastTheTensor { side, index, start, end, rows });
    }
    Ok(())
}

fn check_rank(side: SplitSide, index: usize, rank: u32, world_size: usize) -> Result<(), GroupPartError> {
    if rank as usize >= world_size {
        return Err(GroupPartError::UnknownRank { side, index, rank, world_size });
    }
    Ok(())
}

/// A row that two of the ranges hold.
fn shared_row(ranges: impl Iterator<Item = Range> + Clone) -> Option<usize> {
    let ranges = ranges.filter(|range| !range.is_empty());
    // As nearly all are: each behind the one before it.
    let mut end = 0;
    if ranges.clone().all(|range| std::mem::replace(&mut end, range.end) <= range.start) {
        return None;
    }
    let mut ranges: Vec<Range> = ranges.collect();
    ranges.sort_unstable();
    ranges.windows(2).find(|pair| pair[1].start < pair[0].end).map(|pair| pair[1].start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(owned: &[(usize, usize, &[u32])], remote: &[(usize, usize, u32)]) -> GroupPart {
        GroupPart {
            owned: owned
                .iter()
                .map(|&(start, end, ranks)| OwnedSplit { rows: Range { start, end }, ranks: ranks.to_vec() })
                .collect(),
            remote: remote
                .iter()
                .map(|&(start, end, rank)| RemoteSplit { rows: Range { start, end }, rank })
                .collect(),
        }
    }

    #[test]
    fn what_is_shared_with_some_ranks_is_the_rest_of_what_is_shared_with_the_others() {
        let whole =
            part(&[(0, 4, &[0, 1, 2]), (4, 6, &[3]), (6, 9, &[])], &[(0, 4, 0), (4, 5, 3), (5, 7, 1)]);
        let near = whole.shared_with(|rank| rank < 2);
        assert_eq!(near, part(&[(0, 4, &[0, 1]), (4, 6, &[]), (6, 9, &[])], &[(0, 4, 0), (5, 7, 1)]));
        let far = whole.shared_with(|rank| rank >= 2);
        assert_eq!(far, part(&[(0, 4, &[2]), (4, 6, &[3]), (6, 9, &[])], &[(4, 5, 3)]));
        assert_eq!(whole.shared_with(|_| true), whole);
    }

    #[test]
    fn splits_follow_each_other() {
        let built = GroupPart::from_splits([(2, &[2u32, 1][..]), (0, &[]), (3, &[])], [(4, 2), (1, 1)]);
        assert_eq!(built, part(&[(0, 2, &[1, 2]), (2, 2, &[]), (2, 5, &[])], &[(0, 4, 2), (4, 5, 1)]));
    }

    #[test]
    fn special_cases_match_between_ranks() {
        let lengths = vec![vec![1, 0, 2], vec![3, 1, 0], vec![0, 0, 4]];
        let families: [Vec<GroupPart>; 4] = [
            (0..3).map(|rank| GroupPart::all_gather_v(rank, &[2, 0, 5])).collect(),
            (0..3).map(|rank| GroupPart::all_to_all_v(rank, &lengths)).collect(),
            (0..3).map(|rank| GroupPart::broadcast(rank, 3, 1, 7)).collect(),
            (0..3).map(|rank| GroupPart::scatter_v(rank, 2, &[2, 0, 5])).collect(),
        ];
        for parts in &families {
            let total: u64 = parts.iter().map(GroupPart::send_rows).sum();
            assert_eq!(total, parts.iter().map(GroupPart::recv_rows).sum::<u64>());
            for (rank, part) in parts.iter().enumerate() {
                part.check(rank, 3, 100, 100).unwrap();
                for (peer, other) in parts.iter().enumerate() {
                    let sent: Vec<_> =
                        part.owned.iter().filter(|s| s.ranks.contains(&(peer as u32))).collect();
                    let expected: Vec<_> = other.remote.iter().filter(|s| s.rank as usize == rank).collect();
                    assert_eq!(sent.len(), expected.len());
                    assert!(sent.iter().zip(&expected).all(|(a, b)| a.rows.len() == b.rows.len()));
                }
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        use GroupPartError as E;
        let check = |owned, remote| part(owned, remote).check(0, 3, 10, 10).unwrap_err();
        assert!(matches!(
            check(&[(8, 11, &[1])], &[]),
            E::PastTheTensor { side: SplitSide::Owned, rows: 10, .. }
        ));
        assert!(matches!(check(&[], &[(0, 11, 1)]), E::PastTheTensor { side: SplitSide::Remote, .. }));
        assert!(matches!(check(&[(3, 2, &[1])], &[]), E::Reversed { start: 3, end: 2, .. }));
        assert!(matches!(check(&[(0, 1, &[3])], &[]), E::UnknownRank { rank: 3, .. }));
        assert!(matches!(check(&[], &[(0, 1, 7)]), E::UnknownRank { rank: 7, side: SplitSide::Remote, .. }));
        assert!(matches!(check(&[(0, 1, &[2, 1])], &[]), E::UnorderedRanks { first: 2, second: 1, .. }));
        assert!(matches!(check(&[(0, 1, &[1, 1])], &[]), E::UnorderedRanks { .. }));
        assert_eq!(check(&[], &[(0, 4, 1), (3, 5, 2)]), E::RemoteOverlap { row: 3 });
        assert_eq!(check(&[(0, 4, &[1, 2]), (2, 3, &[2])], &[]), E::OwnedTwice { row: 2, rank: 2 });
        assert!(matches!(check(&[(0, 1, &[0])], &[]), E::SelfMismatch { .. }));
        assert!(part(&[(0, 4, &[1]), (2, 3, &[2])], &[(0, 0, 1), (0, 4, 1)]).check(0, 3, 4, 4).is_ok());
    }
}
