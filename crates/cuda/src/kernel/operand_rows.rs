//! Which operands each row of a group-reduce has.

use counterpoint_mask::Range;

use super::RowMove;

/// Rows of the result that have the same operands, in the order of their peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OperandRows {
    /// Rows of the result.
    pub(super) rows: Range,
    /// (peer, first of its rows).
    pub(super) operands: Vec<(usize, usize)>,
}

/// Cuts the rows of a result where its list of operands changes. Rows without operands are left out unless
/// `with_empty`, when all of `rows` are there.
pub(super) fn operand_rows(moves: &[RowMove], rows: usize, with_empty: bool) -> Vec<OperandRows> {
    let moves = moves.iter().filter(|step| !step.to.is_empty());
    let mut cuts: Vec<usize> = moves.clone().flat_map(|step| [step.to.start, step.to.end]).collect();
    if with_empty {
        cuts.extend([0, rows]);
    }
    cuts.sort_unstable();
    cuts.dedup();
    // Moves by where they begin; those that cover the current rows.
    let mut waiting: Vec<&RowMove> = moves.collect();
    waiting.sort_by_key(|step| std::cmp::Reverse(step.to.start));
    let mut active: Vec<&RowMove> = Vec::new();
    let mut out = Vec::new();
    for pair in cuts.windows(2) {
        let rows = Range::new(pair[0], pair[1]);
        active.retain(|step| step.to.end > rows.start);
        while let Some(step) = waiting.pop_if(|step| step.to.start <= rows.start) {
            active.push(step);
        }
        if active.is_empty() && !with_empty {
            continue;
        }
        let mut operands: Vec<(usize, usize)> =
            active.iter().map(|step| (step.peer, step.from.start + rows.start - step.to.start)).collect();
        operands.sort_unstable();
        out.push(OperandRows { rows, operands });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let parts = operand_rows(&moves, 30, with_empty);
            assert!(parts.iter().all(|part| !part.rows.is_empty()));
            for row in 0..30 {
                let mut expected: Vec<_> = moves
                    .iter()
                    .filter(|step| (step.to.start..step.to.end).contains(&row))
                    .map(|step| (step.peer, step.from.start + row - step.to.start))
                    .collect();
                expected.sort_unstable();
                let found: Vec<_> =
                    parts.iter().filter(|part| (part.rows.start..part.rows.end).contains(&row)).collect();
                assert_eq!(found.len(), usize::from(with_empty || !expected.is_empty()), "row {row}");
                for part in found {
                    let here =
                        part.operands.iter().map(|&(peer, first)| (peer, first + row - part.rows.start));
                    assert_eq!(here.collect::<Vec<_>>(), expected, "row {row}");
                }
            }
        }
        assert!(operand_rows(&[], 0, true).is_empty());
        assert!(operand_rows(&[], 5, false).is_empty());
        assert_eq!(operand_rows(&[], 5, true).len(), 1);
    }
}
