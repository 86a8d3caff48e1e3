//! Who sends which rows to whom: the one pattern of group-casts and group-reduces, and the sweep that finds it.

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use crate::runs::{Run, Runs};

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

impl RemoteSplit {
    /// The same rows of a buffer that lacks the first `rows` of this one.
    #[must_use]
    pub fn without_first(&self, rows: usize) -> Self {
        Self { rows: Range::new(self.rows.start - rows, self.rows.end - rows), ..*self }
    }
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

/// Global key rows as they lie in a rank's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedRows {
    /// Global rows.
    pub(crate) range: Range,
    /// Row of the buffer that holds `range.start`.
    pub(crate) start: usize,
}

impl PlacedRows {
    /// Ranges that lie in a buffer one after the other from row `first` on, ascending by their global rows.
    pub(crate) fn of(buffer: &[Range], first: usize) -> Vec<Self> {
        let mut end = first;
        let place = |&range: &Range| {
            end += range.len();
            Self { range, start: end - range.len() }
        };
        let mut placed: Vec<Self> = buffer.iter().map(place).collect();
        placed.sort_unstable_by_key(|rows| rows.range.start);
        placed
    }
}

/// Who takes a piece of the key sequence, and where to.
pub(crate) struct Receivers<'a> {
    /// Ascending.
    pub(crate) ranks: &'a [u32],
    /// By rank: a row's place in the buffer less the row, modulo the size of the type.
    shift: &'a [usize],
}

impl Receivers<'_> {
    /// Where `piece` lies in the buffer of a receiver.
    pub(crate) fn rows(&self, rank: u32, piece: &Range) -> Range {
        let start = piece.start.wrapping_add(self.shift[rank as usize]);
        Range::new(start, start + piece.len())
    }
}

/// Where rows that ranks receive begin and end, ascending.
struct Ends(Vec<RowEnd>);

/// Where a rank's range begins or ends.
#[derive(Clone, Copy, Debug)]
struct RowEnd {
    /// Twice the row, and one more where a range begins: at one row ranges end before others begin.
    place: usize,
    rank: u32,
    /// What begins here lies so far behind its row in the buffer, modulo the size of the type.
    shift: usize,
}

impl RowEnd {
    fn row(&self) -> usize {
        self.place / 2
    }

    fn begins(&self) -> bool {
        self.place % 2 == 1
    }
}

impl Ends {
    /// `received[r]` are the rows that rank `r` receives, ascending, disjoint and not its own.
    fn of(received: &[Vec<PlacedRows>]) -> Self {
        let mut ends = Vec::with_capacity(2 * received.iter().map(Vec::len).sum::<usize>());
        for (rank, placed) in received.iter().enumerate() {
            let rank = rank as u32;
            for &PlacedRows { range, start } in placed {
                let shift = start.wrapping_sub(range.start);
                ends.push(RowEnd { place: 2 * range.start + 1, rank, shift });
                ends.push(RowEnd { place: 2 * range.end, rank, shift: 0 });
            }
        }
        ends.sort_unstable_by_key(|end| end.place);
        Self(ends)
    }

    /// As [`sweep`], of as many ranks.
    fn sweep(&self, runs: &Runs, ranks: usize, mut visit: impl FnMut(&Run, Range, &Receivers<'_>)) {
        let Self(ends) = self;
        let mut shift = vec![0; ranks];
        let mut receivers: Vec<u32> = Vec::with_capacity(ranks);
        let mut row = 0;
        let mut run = 0;
        let mut next = 0;
        while next < ends.len() {
            let until = ends[next].row();
            while !receivers.is_empty() && row < until {
                while runs.all()[run].range.end <= row {
                    run += 1;
                }
                let owner = &runs.all()[run];
                let piece = Range::new(row, owner.range.end.min(until));
                visit(owner, piece, &Receivers { ranks: &receivers, shift: &shift });
                row = piece.end;
            }
            row = until;
            while next < ends.len() && ends[next].row() == until {
                let end = ends[next];
                match (end.begins(), receivers.binary_search(&end.rank)) {
                    (true, Err(index)) => {
                        receivers.insert(index, end.rank);
                        shift[end.rank as usize] = end.shift;
                    }
                    (false, Ok(index)) => {
                        receivers.remove(index);
                    }
                    // Ranges of a rank share no row: it leaves one before it enters the next.
                    (true, Ok(_)) | (false, Err(_)) => {
                        debug_assert!(false, "rank {} at row {until}", end.rank)
                    }
                }
                next += 1;
            }
        }
    }
}

/// Goes over the key sequence once and names every piece that travels: the longest ranges with one owner and one set of
/// receivers that lie in one place of their buffers, ascending. `received[r]` are the rows that rank `r` receives, ascending,
/// disjoint and not its own.
///
/// One pass over the ends of all ranges and over the owners' runs; between two ends the set of receivers stands still.
pub(crate) fn sweep(
    runs: &Runs,
    received: &[Vec<PlacedRows>],
    visit: impl FnMut(&Run, Range, &Receivers<'_>),
) {
    Ends::of(received).sweep(runs, received.len(), visit);
}

/// Every rank's part of the group-cast that gives rank `r` the global rows `received[r]`.
pub(crate) fn exchange(runs: &Runs, received: &[Vec<PlacedRows>]) -> Vec<GroupPart> {
    // Counting first: parts of a thousand ranks have a million splits, and growing their lists would copy them.
    let (ends, ranks) = (Ends::of(received), received.len());
    let mut counts = vec![(0_usize, 0_usize); ranks];
    ends.sweep(runs, ranks, |owner, _, receivers| {
        counts[owner.rank as usize].0 += 1;
        for &rank in receivers.ranks {
            counts[rank as usize].1 += 1;
        }
    });
    let mut parts: Vec<GroupPart> = counts
        .iter()
        .map(|&(owned, remote)| GroupPart {
            owned: Vec::with_capacity(owned),
            remote: Vec::with_capacity(remote),
        })
        .collect();
    ends.sweep(runs, ranks, |owner, piece, receivers| {
        let split = OwnedSplit { rows: owner.local(&piece), ranks: receivers.ranks.to_vec() };
        parts[owner.rank as usize].owned.push(split);
        for &rank in receivers.ranks {
            let rows = receivers.rows(rank, &piece);
            parts[rank as usize].remote.push(RemoteSplit { rows, rank: owner.rank });
        }
    });
    parts
}

/// The part of `rank` alone; the same as `exchange(..)[rank]`.
pub(crate) fn exchange_part(runs: &Runs, received: &[Vec<PlacedRows>], rank: usize) -> GroupPart {
    let mut part = GroupPart::default();
    let me = rank as u32;
    sweep(runs, received, |owner, piece, receivers| {
        if owner.rank == me {
            part.owned.push(OwnedSplit { rows: owner.local(&piece), ranks: receivers.ranks.to_vec() });
        } else if receivers.ranks.binary_search(&me).is_ok() {
            part.remote.push(RemoteSplit { rows: receivers.rows(me, &piece), rank: owner.rank });
        }
    });
    part
}
