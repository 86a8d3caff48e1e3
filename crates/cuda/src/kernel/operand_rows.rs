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
    let mut cuts: Vec<usize> = moves.iter().flat_map(|step| [step.to.start, step.to.end]).collect();
    if with_empty {
        cuts.extend([0, rows]);
    }
    cuts.sort_unstable();
    cuts.dedup();
    // Moves by where they begin; those that cover the current rows.
    let mut waiting: Vec<&RowMove> = moves.iter().filter(|step| !step.to.is_empty()).collect();
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

    #[test]
    fn rows_are_cut_where_operands_change() {
        let step = |peer, from: usize, to: usize, rows: usize| RowMove {
            peer,
            from: Range::new(from, from + rows),
            to: Range::new(to, to + rows),
        };
        let moves = [step(3, 10, 2, 4), step(1, 0, 4, 4), step(2, 7, 20, 1), step(0, 0, 5, 0)];
        let expected = [
            (2, 4, vec![(3, 10)]),
            (4, 6, vec![(1, 0), (3, 12)]),
            (6, 8, vec![(1, 2)]),
            (20, 21, vec![(2, 7)]),
        ];
        let of = |rows: Vec<OperandRows>| -> Vec<_> {
            rows.into_iter().map(|o| (o.rows.start, o.rows.end, o.operands)).collect()
        };
        let merged = |rows: Vec<(usize, usize, Vec<(usize, usize)>)>| {
            rows.into_iter().filter(|(.., operands)| !operands.is_empty()).collect::<Vec<_>>()
        };
        // A move without rows cuts, but takes part in nothing.
        let found = of(operand_rows(&moves, 30, false));
        let total: usize = found.iter().map(|(start, end, _)| end - start).sum();
        assert_eq!(total, 7);
        assert_eq!(found[0], expected[0]);
        let all = of(operand_rows(&moves, 30, true));
        assert_eq!(all.iter().map(|(start, end, _)| end - start).sum::<usize>(), 30);
        assert_eq!(merged(all), found);
        assert!(operand_rows(&[], 0, true).is_empty());
    }
}
