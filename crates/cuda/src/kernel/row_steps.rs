//! Rows that are copied, step by step: from a peer to own rows.

use counterpoint_mask::Range;
use counterpoint_schedule::RowNumbers;

/// Rows of a peer's tensors and the rows of the own ones that they are copied to, of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowMove {
    /// Which peer: an index into the addresses that a launch is given.
    pub peer: usize,
    /// Its rows.
    pub from: Range,
    /// The own rows.
    pub to: Range,
}

/// The same of fewer than 2^32 rows of each: half as long, where there are tens of thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowStep {
    /// Which peer.
    pub peer: u32,
    /// The first of its rows.
    pub from: u32,
    /// The first of the own rows.
    pub to: u32,
    /// How many.
    pub count: u32,
}

impl From<&RowMove> for RowStep {
    fn from(step: &RowMove) -> Self {
        let RowMove { peer, from, to } = *step;
        Self { peer: peer as u32, from: from.start as u32, to: to.start as u32, count: from.len() as u32 }
    }
}

/// Steps that are looked at together, and one before them.
const AT_ONCE: usize = 65;

/// Rows of a peer that are copied to own rows that follow each other: an expert's tokens, say, as their routing lists them.
#[derive(Clone, Debug)]
pub struct RowGather {
    /// Which peer.
    pub peer: u32,
    /// Its rows.
    pub rows: RowNumbers,
    /// The first of the own rows.
    pub to: u32,
}

/// What a [`RowCopy`](super::RowCopy) copies, as steps.
pub trait RowSteps {
    /// Of every peer how many steps there are at most, and their rows.
    fn counts(&self) -> Vec<StepCount>;

    /// Gives all steps in their order, some at once.
    fn each(&self, each: impl FnMut(&[RowStep]));
}

impl RowSteps for [RowStep] {
    fn counts(&self) -> Vec<StepCount> {
        let mut counts = Vec::new();
        self.iter().for_each(|step| count(&mut counts, step.peer, (1, u64::from(step.count))));
        counts
    }

    fn each(&self, each: impl FnMut(&[RowStep])) {
        self.chunks(AT_ONCE).for_each(each);
    }
}

impl RowSteps for [RowGather] {
    fn counts(&self) -> Vec<StepCount> {
        let mut counts = Vec::new();
        for RowGather { peer, rows, .. } in self {
            count(&mut counts, *peer, (rows.count(), rows.count() as u64));
        }
        counts
    }

    /// Rows that follow each other are one.
    fn each(&self, mut each: impl FnMut(&[RowStep])) {
        // Nothing follows the first, which is none of them.
        let none = RowStep { peer: u32::MAX, from: u32::MAX, to: u32::MAX, count: 0 };
        let mut some = [none; AT_ONCE];
        let mut last = 0;
        let mut add = |next: RowStep| {
            let before = &mut some[last];
            let follows = before.from + before.count == next.from && before.to + before.count == next.to;
            if follows && before.peer == next.peer {
                before.count += next.count;
                return;
            }
            if last + 1 == AT_ONCE {
                each(&some[1..]);
                last = 0;
            }
            last += 1;
            some[last] = next;
        };
        for &RowGather { peer, ref rows, to } in self {
            match rows {
                RowNumbers::Range(rows) => {
                    add(RowStep { peer, from: rows.start as u32, to, count: rows.len() as u32 });
                }
                RowNumbers::List(rows) => {
                    for (to, from) in (to..).zip(rows.iter()) {
                        add(RowStep { peer, from: *from, to, count: 1 });
                    }
                }
            }
        }
        each(&some[1..=last]);
    }
}

/// Steps of a peer, and their rows.
pub type StepCount = (usize, u64);

/// Adds steps to those of a peer.
fn count(counts: &mut Vec<StepCount>, peer: u32, (steps, rows): StepCount) {
    let peer = peer as usize;
    if peer >= counts.len() {
        counts.resize(peer + 1, (0, 0));
    }
    counts[peer] = (counts[peer].0 + steps, counts[peer].1 + rows);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use counterpoint_schedule::RowList;

    use super::*;

    /// The steps of rows that are listed, or neighbours, are those of rows one by one, put together where they follow each other.
    #[test]
    fn gathered_rows_are_the_steps_of_their_rows() {
        let list = |rows: Vec<u32>| {
            let part = Range::new(0, rows.len());
            RowNumbers::List(RowList::new(&Arc::new(rows), part).unwrap())
        };
        let scattered: Vec<u32> = (0..200).map(|row| 3 * row + row % 2).collect();
        let gathers = [
            RowGather { peer: 0, rows: list(vec![0, 1, 5]), to: 0 },
            RowGather { peer: 0, rows: RowNumbers::Range(Range::new(6, 9)), to: 3 },
            RowGather { peer: 1, rows: list(scattered.clone()), to: 6 },
            RowGather { peer: 2, rows: RowNumbers::Range(Range::new(0, 7)), to: 300 },
        ];
        let mut found = Vec::new();
        gathers[..].each(|some| found.extend_from_slice(some));
        let step = |peer, from, to, count| RowStep { peer, from, to, count };
        let mut wanted = vec![step(0, 0, 0, 2), step(0, 5, 2, 4)];
        wanted.extend((6..).zip(&scattered).map(|(to, from)| step(1, *from, to, 1)));
        wanted.push(step(2, 0, 300, 7));
        assert_eq!(found, wanted);
        assert_eq!(gathers[..].counts(), [(6, 6), (200, 200), (7, 7)]);
        let mut same = Vec::new();
        found[..].each(|some| same.extend_from_slice(some));
        assert_eq!((same, found[..].counts()), (found, vec![(2, 6), (200, 200), (1, 7)]));
    }
}
