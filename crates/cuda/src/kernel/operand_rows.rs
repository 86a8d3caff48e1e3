//! Which operands each row of a group-reduce has.

use counterpoint_mask::Range;

use super::RowMove;

/// Rows of a result, cut where their operands change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OperandRows {
    /// Rows that have the same operands, and which of the list these are.
    parts: Vec<(Range, Range)>,
    operands: Vec<Operand>,
}

/// (peer, first of its rows), of fewer than 2^32: a routing has tens of thousands.
pub(super) type Operand = (u32, u32);

impl OperandRows {
    /// Of the operands of `moves`, in the order of their peers; rows of a peer go to a row once. Rows without operands are left out unless
    /// `with_empty`, when all of `rows` are there.
    pub(super) fn of_moves(moves: &[RowMove], rows: usize, with_empty: bool) -> Self {
        let peers = by_peer(moves);
        let mut next = vec![0; peers.len()];
        let mut all = Self::default();
        all.operands.reserve(moves.len());
        let mut row = 0;
        loop {
            let first = all.operands.len();
            // Where some operand ends, or another comes.
            let mut end = if with_empty && row < rows { rows } else { usize::MAX };
            for (moves, next) in peers.iter().zip(&mut next) {
                while moves.get(*next).is_some_and(|step| step.to.end <= row) {
                    *next += 1;
                }
                let Some(step) = moves.get(*next) else { continue };
                if step.to.start <= row {
                    end = end.min(step.to.end);
                    all.operands.push((step.peer as u32, (step.from.start + row - step.to.start) as u32));
                } else {
                    end = end.min(step.to.start);
                }
            }
            if end == usize::MAX {
                return all;
            }
            if with_empty || all.operands.len() > first {
                all.parts.push((Range::new(row, end), Range::new(first, all.operands.len())));
            }
            row = end;
        }
    }

    /// Of `terms`, a row of one peer each and the row that it goes to, in the order in which they are added; `None` where some of `rows` has
    /// none.
    pub(super) fn of_terms(rows: usize, terms: &[(u32, u32)]) -> Option<Self> {
        let mut ends = vec![0u32; rows];
        for &(_, to) in terms {
            ends[to as usize] += 1;
        }
        // From how many operands a row has to where they begin, and by the second pass on to where they end.
        let mut end = 0;
        for of_row in &mut ends {
            if *of_row == 0 {
                return None;
            }
            (end, *of_row) = (end + *of_row, end);
        }
        let mut sorted = vec![(0, 0); end as usize];
        for &(from, to) in terms {
            let next = &mut ends[to as usize];
            sorted[*next as usize] = (0, from);
            *next += 1;
        }
        let mut all = Self { parts: Vec::with_capacity(rows), operands: sorted };
        let mut begin = 0;
        for (row, &end) in ends.iter().enumerate() {
            all.add_row(row, Range::new(begin, end as usize));
            begin = end as usize;
        }
        Some(all)
    }

    /// The same, cut where what `of_rows` says of a row is not what it says of the one before.
    pub(super) fn cut_where(&self, of_rows: &[u32]) -> Self {
        let mut all = Self { parts: Vec::with_capacity(self.parts.len()), operands: Vec::new() };
        for (rows, operands) in self.parts() {
            let mut first = rows.start;
            for of_same in of_rows[rows.start..rows.end].chunk_by(|a, b| a == b) {
                let (skipped, begin) = ((first - rows.start) as u32, all.operands.len());
                all.operands.extend(operands.iter().map(|&(peer, from)| (peer, from + skipped)));
                let listed = Range::new(begin, all.operands.len());
                all.parts.push((Range::new(first, first + of_same.len()), listed));
                first += of_same.len();
            }
        }
        all
    }

    /// Adds a row with these operands, to the last part where it and they follow that's.
    fn add_row(&mut self, row: usize, operands: Range) {
        if let Some((rows, last)) = self.parts.last_mut().filter(|(_, last)| last.len() == operands.len()) {
            let [last, now] = [*last, operands].map(|of| &self.operands[of.start..of.end]);
            let follows = |(last, now): (&Operand, &Operand)| (last.0, last.1 + rows.len() as u32) == *now;
            if last.iter().zip(now).all(follows) {
                rows.end += 1;
                return;
            }
        }
        self.parts.push((Range::new(row, row + 1), operands));
    }

    /// The parts, each with its operands in the order in which they are added.
    pub(super) fn parts(&self) -> impl Iterator<Item = (Range, &[Operand])> {
        self.parts.iter().map(|&(rows, of)| (rows, &self.operands[of.start..of.end]))
    }

    /// How many parts there are, and how many operands these have at most.
    pub(super) fn lengths(&self) -> (usize, usize) {
        (self.parts.len(), self.operands.len())
    }

    /// Rows of all parts.
    pub(super) fn rows(&self) -> u64 {
        self.parts.iter().map(|(rows, _)| rows.len() as u64).sum()
    }
}

/// Moves that have rows by peer, of each in the order of the rows that they go to.
fn by_peer(moves: &[RowMove]) -> Vec<Vec<RowMove>> {
    let mut peers: Vec<Vec<RowMove>> = Vec::new();
    for step in moves.iter().filter(|step| !step.to.is_empty()) {
        if step.peer >= peers.len() {
            peers.resize_with(step.peer + 1, Vec::new);
        }
        peers[step.peer].push(*step);
    }
    peers.retain(|moves| !moves.is_empty());
    for moves in &mut peers {
        if !moves.is_sorted_by_key(|step| step.to.start) {
            moves.sort_unstable_by_key(|step| step.to.start);
        }
    }
    peers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row by row as before, and no part has rows of which something else is said.
    #[test]
    fn rows_are_cut_where_something_else_is_said_of_them() {
        let (from, to) = (Range::new(10, 16), Range::new(2, 8));
        let moves = [
            RowMove { peer: 3, from, to },
            RowMove { peer: 1, from: Range::new(0, 4), to: Range::new(4, 8) },
        ];
        let whole = OperandRows::of_moves(&moves, 10, true);
        let of_rows = [1, 1, 1, 2, 2, 2, 5, 5, 5, 6];
        let cut = whole.cut_where(&of_rows);
        let of_row = |all: &OperandRows, row: usize| -> Vec<Operand> {
            let (rows, operands) =
                all.parts().find(|(rows, _)| (rows.start..rows.end).contains(&row)).unwrap();
            operands.iter().map(|&(peer, from)| (peer, from + (row - rows.start) as u32)).collect()
        };
        (0..10).for_each(|row| assert_eq!(of_row(&cut, row), of_row(&whole, row), "row {row}"));
        assert!(
            cut.parts().all(|(rows, _)| of_rows[rows.start..rows.end].windows(2).all(|two| two[0] == two[1]))
        );
        assert_eq!((whole.lengths().0, cut.lengths().0), (4, 7));
        assert_eq!(whole.cut_where(&[1; 10]), whole);
    }

    /// Row by row, the definition; and neighbours differ.
    #[test]
    fn rows_are_cut_where_operands_change() {
        let step = |peer, from: usize, to: usize, rows: usize| RowMove {
            peer,
            from: Range::new(from, from + rows),
            to: Range::new(to, to + rows),
        };
        let moves =
            [step(3, 10, 2, 4), step(1, 0, 4, 4), step(2, 7, 20, 1), step(0, 0, 5, 0), step(0, 30, 8, 3)];
        for with_empty in [false, true] {
            let all = OperandRows::of_moves(&moves, 30, with_empty);
            assert!(all.parts().all(|(rows, _)| !rows.is_empty()));
            for row in 0..30 {
                let mut expected: Vec<_> = moves
                    .iter()
                    .filter(|step| (step.to.start..step.to.end).contains(&row))
                    .map(|step| (step.peer as u32, (step.from.start + row - step.to.start) as u32))
                    .collect();
                expected.sort_unstable();
                let found: Vec<_> = all.parts().filter(|(rows, _)| rows.contains(row)).collect();
                assert_eq!(found.len(), usize::from(with_empty || !expected.is_empty()), "row {row}");
                for (rows, operands) in found {
                    let here =
                        operands.iter().map(|&(peer, first)| (peer, first + (row - rows.start) as u32));
                    assert_eq!(here.collect::<Vec<_>>(), expected, "row {row}");
                }
            }
        }
        let parts = |moves: &[RowMove], rows, with_empty| {
            OperandRows::of_moves(moves, rows, with_empty).parts().count()
        };
        assert_eq!([parts(&[], 0, true), parts(&[], 5, false), parts(&[], 5, true)], [0, 0, 1]);
    }

    /// Rows 0 and 1 have two terms that follow each other, row 2 another one behind those, row 3 one.
    #[test]
    fn terms_of_a_row_are_added_in_their_order() {
        let terms = [(9, 2), (5, 0), (7, 3), (2, 0), (6, 1), (3, 1), (4, 2)];
        let found = OperandRows::of_terms(4, &terms).unwrap();
        let parts: Vec<_> =
            found.parts().map(|(rows, operands)| (rows.start, rows.end, operands.to_vec())).collect();
        let wanted = vec![(0, 2, vec![(0, 5), (0, 2)]), (2, 3, vec![(0, 9), (0, 4)]), (3, 4, vec![(0, 7)])];
        assert_eq!(parts, wanted);
        assert_eq!(found.rows(), 4);
        assert_eq!(OperandRows::of_terms(5, &terms), None);
    }
}
