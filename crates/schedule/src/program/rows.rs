//! Rows that operands are put together from and that results go to: ranges, and lists of rows that operations share.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use counterpoint_mask::Range;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::BufferId;

/// Some rows of a buffer `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowBlock {
    /// The buffer.
    pub buffer: BufferId,
    /// The rows, at least one.
    pub rows: Range,
}

/// Rows in their order: neighbours, or those of a list.
#[derive(Clone, Debug)]
pub enum RowNumbers {
    /// Neighbours, at least one.
    Range(Range),
    /// As a list has them.
    List(RowList),
}

/// A part of a list of rows, at least one: tokens of an expert, say, whose routing has the list. Fewer than 2^32.
#[derive(Clone, Debug)]
pub struct RowList {
    all: Arc<Vec<u32>>,
    part: Range,
}

/// Rows of buffers one after the other: an operand. It is, and serialises as, the list of blocks that [`RowBlocks::iter`] gives: listed rows
/// are a block where they follow each other, ranges remain as they are.
#[derive(Clone, Default)]
pub struct RowBlocks(Vec<RowPiece>);

/// Some rows of a buffer `[rows, columns]`, which may be listed.
#[derive(Clone, Debug)]
pub struct RowPiece {
    /// The buffer.
    pub buffer: BufferId,
    /// The rows.
    pub rows: RowNumbers,
}

/// Rows of a buffer, ascending: where a result goes. It is, and serialises as, a list of ranges, as [`RowBlocks`] one of blocks.
#[derive(Clone, Default)]
pub struct RowRanges(Vec<RowNumbers>);

impl RowList {
    /// Part of a list; `None` where it has no row.
    pub fn new(all: &Arc<Vec<u32>>, part: Range) -> Option<Self> {
        (!part.is_empty()).then(|| Self { all: all.clone(), part })
    }
}

impl Deref for RowList {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.all[self.part.start..self.part.end]
    }
}

impl RowNumbers {
    /// How many.
    pub fn count(&self) -> usize {
        match self {
            Self::Range(rows) => rows.len(),
            Self::List(rows) => rows.len(),
        }
    }

    /// Gives each row and that of others, as many, of the same place.
    #[inline]
    pub fn each_with(&self, others: &Self, mut each: impl FnMut(u32, u32)) {
        let from = |range: &Range| range.start as u32..;
        match (self, others) {
            (Self::Range(rows), Self::Range(others)) => {
                (rows.start as u32..rows.end as u32).zip(from(others)).for_each(|(a, b)| each(a, b));
            }
            (Self::List(rows), Self::Range(others)) => {
                rows.iter().zip(from(others)).for_each(|(a, b)| each(*a, b));
            }
            (Self::Range(rows), Self::List(others)) => {
                from(rows).zip(others.iter()).for_each(|(a, b)| each(a, *b));
            }
            (Self::List(rows), Self::List(others)) => {
                rows.iter().zip(others.iter()).for_each(|(a, b)| each(*a, *b));
            }
        }
    }
}

impl RowBlocks {
    /// Adds listed rows of a buffer, where there are any.
    pub fn push_list(&mut self, buffer: BufferId, rows: Option<RowList>) {
        self.0.extend(rows.map(|rows| RowPiece { buffer, rows: RowNumbers::List(rows) }));
    }

    /// Adds others behind its rows.
    pub fn extend(&mut self, others: &Self) {
        self.0.extend_from_slice(&others.0);
    }

    /// The numbers of its rows, whatever buffers they are in.
    pub fn numbers(&self) -> Vec<u32> {
        let mut all = Vec::with_capacity(self.count());
        for RowPiece { rows, .. } in &self.0 {
            match rows {
                RowNumbers::Range(rows) => all.extend(rows.start as u32..rows.end as u32),
                RowNumbers::List(rows) => all.extend_from_slice(rows),
            }
        }
        all
    }

    /// Whether no row comes before one behind which it lies: buffers in their order, and in each its rows.
    pub fn ascend(&self) -> bool {
        let ends = |piece: &RowPiece| match &piece.rows {
            RowNumbers::Range(rows) => [rows.start, rows.end - 1],
            RowNumbers::List(rows) => [rows[0], rows[rows.len() - 1]].map(|row| row as usize),
        };
        let follow =
            |pair: &[RowPiece]| (pair[0].buffer, ends(&pair[0])[1]) <= (pair[1].buffer, ends(&pair[1])[0]);
        let sorted = |piece: &RowPiece| match &piece.rows {
            RowNumbers::Range(_) => true,
            RowNumbers::List(rows) => rows.is_sorted(),
        };
        self.0.windows(2).all(follow) && self.0.iter().all(sorted)
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many rows.
    pub fn count(&self) -> usize {
        self.0.iter().map(|piece| piece.rows.count()).sum()
    }

    /// The rows as ranges and as lists.
    pub fn pieces(&self) -> &[RowPiece] {
        &self.0
    }

    /// The rows as blocks.
    pub fn iter(&self) -> impl Iterator<Item = RowBlock> + '_ {
        let pieces = self.0.iter().map(|piece| (piece.buffer, &piece.rows));
        Runs::of(pieces).map(|(buffer, rows)| RowBlock { buffer, rows })
    }

    /// The rows as one block, where they follow each other in one buffer.
    pub fn together(&self) -> Option<RowBlock> {
        let mut blocks = self.iter();
        let first = blocks.next()?;
        let follow = |one: RowBlock, next: RowBlock| {
            let rows = Range { start: one.rows.start, end: next.rows.end };
            (one.buffer == next.buffer && one.rows.end == next.rows.start).then_some(RowBlock { rows, ..one })
        };
        blocks.try_fold(first, follow)
    }

    /// Adds its buffers where they first come: tokens of experts are lists of a few.
    pub fn add_buffers(&self, out: &mut Vec<BufferId>) {
        for RowPiece { buffer, .. } in &self.0 {
            if !out.contains(buffer) {
                out.push(*buffer);
            }
        }
    }
}

impl RowRanges {
    /// Adds listed rows, where there are any.
    pub fn push_list(&mut self, rows: Option<RowList>) {
        self.0.extend(rows.map(RowNumbers::List));
    }

    /// Adds a range, to the last one where it follows that.
    pub fn push(&mut self, rows: Range) {
        match self.0.last_mut() {
            Some(RowNumbers::Range(last)) if last.end == rows.start => last.end = rows.end,
            _ => self.0.push(RowNumbers::Range(rows)),
        }
    }

    /// How many rows.
    pub fn count(&self) -> usize {
        self.0.iter().map(RowNumbers::count).sum()
    }

    /// The rows as ranges and as lists.
    pub fn pieces(&self) -> &[RowNumbers] {
        &self.0
    }

    /// The only range, where there is one alone.
    pub fn only(&self) -> Option<Range> {
        match self.0[..] {
            [RowNumbers::Range(only)] => Some(only),
            _ => None,
        }
    }

    /// The rows as ranges.
    pub fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        ranges_of(self.0.iter())
    }
}

/// Rows as ranges.
pub(super) fn ranges_of<'a>(rows: impl Iterator<Item = &'a RowNumbers>) -> impl Iterator<Item = Range> {
    Runs::of(rows.map(|rows| ((), rows))).map(|((), rows)| rows)
}

/// Ranges of rows, of which listed ones that follow each other are one.
struct Runs<'a, K, I> {
    /// What follows the list.
    pieces: I,
    /// A piece that comes behind the list, where that has been looked at.
    next: Option<(K, &'a RowNumbers)>,
    /// What is left of a list.
    list: Option<(K, &'a [u32])>,
}

impl<'a, K: Copy + PartialEq, I: Iterator<Item = (K, &'a RowNumbers)>> Runs<'a, K, I> {
    fn of(pieces: I) -> Self {
        Self { pieces, next: None, list: None }
    }
}

impl<'a, K: Copy + PartialEq, I: Iterator<Item = (K, &'a RowNumbers)>> Iterator for Runs<'a, K, I> {
    type Item = (K, Range);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let (key, mut list) = match self.list.take() {
            Some(list) => list,
            None => match self.next.take().or_else(|| self.pieces.next())? {
                (key, RowNumbers::Range(rows)) => return Some((key, *rows)),
                (key, RowNumbers::List(rows)) => (key, &**rows),
            },
        };
        let first = list[0];
        let mut end = first;
        loop {
            let count = list.iter().zip(end..).take_while(|(row, next)| **row == *next).count();
            (end, list) = (end + count as u32, &list[count..]);
            if !list.is_empty() {
                self.list = Some((key, list));
                break;
            }
            self.next = self.pieces.next();
            match self.next {
                Some((other, RowNumbers::List(rows))) if other == key && rows[0] == end => list = rows,
                _ => break,
            }
        }
        Some((key, Range { start: first as usize, end: end as usize }))
    }
}

impl From<RowBlock> for RowPiece {
    fn from(RowBlock { buffer, rows }: RowBlock) -> Self {
        Self { buffer, rows: RowNumbers::Range(rows) }
    }
}

impl FromIterator<RowBlock> for RowBlocks {
    fn from_iter<T: IntoIterator<Item = RowBlock>>(blocks: T) -> Self {
        Self(blocks.into_iter().map(RowPiece::from).collect())
    }
}

impl From<Vec<RowBlock>> for RowBlocks {
    fn from(blocks: Vec<RowBlock>) -> Self {
        blocks.into_iter().collect()
    }
}

impl FromIterator<Range> for RowRanges {
    fn from_iter<T: IntoIterator<Item = Range>>(ranges: T) -> Self {
        Self(ranges.into_iter().map(RowNumbers::Range).collect())
    }
}

impl From<Vec<Range>> for RowRanges {
    fn from(ranges: Vec<Range>) -> Self {
        ranges.into_iter().collect()
    }
}

/// Values that are the list that `iter` gives.
macro_rules! is_a_list_of {
    ($item:ty, $name:ty) => {
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.iter().eq(other.iter())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_list().entries(self.iter()).finish()
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.iter().collect::<Vec<_>>().serialize(serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Ok(Vec::<$item>::deserialize(deserializer)?.into())
            }
        }
    };
}
is_a_list_of!(RowBlock, RowBlocks);
is_a_list_of!(Range, RowRanges);

#[cfg(test)]
mod tests {
    use super::*;

    fn list(rows: &[u32]) -> Option<RowList> {
        RowList::new(&Arc::new(rows.to_vec()), Range::new(0, rows.len()))
    }

    fn blocks(of: &[(usize, usize, usize)]) -> Vec<RowBlock> {
        let block = |&(buffer, start, end)| RowBlock { buffer: BufferId(buffer), rows: Range { start, end } };
        of.iter().map(block).collect()
    }

    /// Lists are the blocks that the rows would be one by one, also where two lists meet; ranges stay apart.
    #[test]
    fn listed_rows_are_blocks_where_they_follow_each_other() {
        let mut rows = RowBlocks::from(blocks(&[(0, 0, 2), (0, 2, 3)]));
        rows.push_list(BufferId(0), list(&[3, 4, 9]));
        rows.push_list(BufferId(0), list(&[10]));
        rows.push_list(BufferId(1), list(&[11, 12]));
        rows.push_list(BufferId(1), list(&[]));
        let wanted = blocks(&[(0, 0, 2), (0, 2, 3), (0, 3, 5), (0, 9, 11), (1, 11, 13)]);
        assert_eq!(rows.iter().collect::<Vec<_>>(), wanted);
        assert_eq!((rows.count(), rows == RowBlocks::from(wanted.clone())), (9, true));
        assert_ne!(rows, RowBlocks::from(wanted[1..].to_vec()));
        let text = serde_json::to_string(&rows).unwrap();
        assert_eq!(text, serde_json::to_string(&wanted).unwrap());
        assert_eq!(serde_json::from_str::<RowBlocks>(&text).unwrap(), rows);
        let mut buffers = Vec::new();
        rows.add_buffers(&mut buffers);
        assert_eq!(buffers, [0, 1].map(BufferId));
        assert_eq!(rows.together(), None);
        let mut one = RowBlocks::from(blocks(&[(0, 5, 8)]));
        one.push_list(BufferId(0), list(&[8, 9]));
        assert_eq!(one.together(), Some(blocks(&[(0, 5, 10)])[0]));
        assert_eq!(RowBlocks::default().together(), None);
    }

    #[test]
    fn ranges_of_results_grow_and_pairs_are_of_the_same_place() {
        let mut ranges = RowRanges::default();
        ranges.push(Range::new(1, 3));
        ranges.push(Range::new(3, 4));
        assert_eq!(ranges.only(), Some(Range::new(1, 4)));
        ranges.push_list(list(&[6, 7, 9]));
        let found: Vec<_> = ranges.iter().collect();
        assert_eq!(found, [Range::new(1, 4), Range::new(6, 8), Range::new(9, 10)]);
        assert_eq!((ranges.count(), ranges.only()), (6, None));
        for (a, b) in [(0, 1), (1, 0), (0, 0), (1, 1)] {
            let mut pairs = Vec::new();
            ranges.pieces()[a].each_with(&ranges.pieces()[b], |a, b| pairs.push([a, b]));
            let of = [[1, 2, 3], [6, 7, 9]];
            assert_eq!(pairs, [0, 1, 2].map(|at| [of[a][at], of[b][at]]));
        }
    }
}
