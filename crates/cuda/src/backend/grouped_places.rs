//! Where the rows of a launch of a grouped GEMM lie and go.

use counterpoint_schedule::{
    BufferId, GroupedLaunch, GroupedProblem, GroupedResults, GroupedRows, RowNumbers, RowPiece,
};

use crate::kernel::{ProblemRows, RowGather, RowStep};

/// Where the rows of a launch lie and go.
#[derive(Default)]
pub(super) struct Places {
    /// Buffers that rows lie in, those that are gathered or their problems'.
    pub(super) sources: Vec<BufferId>,
    /// Of each problem its rows.
    pub(super) problems: Vec<Vec<ProblemRows>>,
    /// Rows of all problems.
    pub(super) count: usize,
    /// Rows to where they lie together, and results back from there.
    pub(super) gathers: Vec<RowGather>,
    pub(super) results: Vec<RowStep>,
}

impl Places {
    pub(super) fn of(launch: &GroupedLaunch) -> Self {
        let mut places = Self::default();
        let begins = begins(launch);
        places.count = begins.last().map_or(0, |end| *end as usize);
        for (problem, ends) in launch.problems.iter().zip(begins.windows(2)) {
            let (begin, count) = (ends[0], (ends[1] - ends[0]) as usize);
            let (source, first) = places.enter(problem, begin, launch.gathers);
            let rows = |at: u32, to: u32, count: usize| ProblemRows {
                source,
                first: first + at as usize,
                to: to as usize,
                count,
            };
            let mut listed = Vec::new();
            match launch.results {
                GroupedResults::InPlace => {
                    problem.results.iter().for_each(|GroupedRows { at, to, .. }| {
                        each_range(at, to, |at, to, count| {
                            add_rows(&mut listed, rows(at, to, count as usize))
                        });
                    })
                }
                GroupedResults::Copied => {
                    problem.results.iter().for_each(|GroupedRows { at, to, .. }| {
                        each_range(at, to, |at, to, count| {
                            add_step(&mut places.results, RowStep { peer: 0, from: begin + at, to, count });
                        });
                    })
                }
                GroupedResults::Summed => {}
            }
            if launch.results != GroupedResults::InPlace && count > 0 {
                listed.push(rows(0, begin, count));
            }
            places.problems.push(listed);
        }
        places
    }

    /// Where the rows of a problem lie as they are multiplied: in which source, and from which row on. They are gathered from this one on, or
    /// follow each other.
    fn enter(&mut self, problem: &GroupedProblem, begin: u32, gathers: bool) -> (usize, usize) {
        if !gathers {
            let together = problem.rows.together();
            return together.map_or((0, 0), |block| (self.source(block.buffer), block.rows.start));
        }
        let mut to = begin;
        for RowPiece { buffer, rows } in problem.rows.pieces() {
            let peer = self.source(*buffer) as u32;
            self.gathers.push(RowGather { peer, rows: rows.clone(), to });
            to += rows.count() as u32;
        }
        (0, begin as usize)
    }

    /// The number of a buffer among the sources.
    fn source(&mut self, buffer: BufferId) -> usize {
        self.sources.iter().position(|id| *id == buffer).unwrap_or_else(|| {
            self.sources.push(buffer);
            self.sources.len() - 1
        })
    }
}

/// Where the rows of each problem begin where all lie together, and where the last ones end.
fn begins(launch: &GroupedLaunch) -> Vec<u32> {
    let mut ends = vec![0];
    ends.extend(launch.problems.iter().scan(0, |end, problem| {
        *end += problem.rows.count() as u32;
        Some(*end)
    }));
    ends
}

/// Gives rows and those of results, range by range or one by one, with how many.
fn each_range(rows: &RowNumbers, results: &RowNumbers, mut each: impl FnMut(u32, u32, u32)) {
    match (rows, results) {
        (RowNumbers::Range(rows), RowNumbers::Range(results)) => {
            each(rows.start as u32, results.start as u32, rows.len() as u32);
        }
        _ => rows.each_with(results, |row, result| each(row, result, 1)),
    }
}

/// Adds rows to move, which neighbours do together.
#[inline]
fn add_step(steps: &mut Vec<RowStep>, next: RowStep) {
    if let Some(last) = steps.last_mut()
        && last.from + last.count == next.from
        && last.to + last.count == next.to
        && last.peer == next.peer
    {
        last.count += next.count;
        return;
    }
    steps.push(next);
}

#[inline]
fn add_rows(rows: &mut Vec<ProblemRows>, next: ProblemRows) {
    if let Some(last) = rows.last_mut()
        && last.first + last.count == next.first
        && last.to + last.count == next.to
        && last.source == next.source
    {
        last.count += next.count;
        return;
    }
    rows.push(next);
}

/// The rows of the results, which are one after the other in memory, and those in which they are summed, in the order of the products.
pub(super) fn terms(launch: &GroupedLaunch) -> Vec<(u32, u32)> {
    let mut terms = Vec::with_capacity(launch.rows());
    for (problem, begin) in launch.problems.iter().zip(begins(launch)) {
        for GroupedRows { at, to, .. } in &problem.results {
            at.each_with(to, |at, to| terms.push((begin + at, to)));
        }
    }
    terms
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;
    use counterpoint_schedule::{Accumulate, Gemm, GemmLayout, RowBlock};

    use super::*;
    use crate::kernel::RowSteps;

    fn gemm(expert: usize, a: &[(usize, usize)], out: &[(usize, usize)], accumulate: Accumulate) -> Gemm {
        let block = |buffer, start, end| RowBlock { buffer: BufferId(buffer), rows: Range::new(start, end) };
        Gemm {
            layout: GemmLayout::Nt,
            a: a.iter().map(|&(start, end)| block(0, start, end)).collect(),
            b: vec![block(1, 64 * expert, 64 * expert + 64)].into(),
            out: BufferId(2),
            out_rows: out.iter().map(|&(start, end)| Range::new(start, end)).collect(),
            pass_rows: 100,
            columns: None,
            bias: None,
            accumulate,
        }
    }

    fn step(peer: u32, from: u32, to: u32, count: u32) -> RowStep {
        RowStep { peer, from, to, count }
    }

    /// Token 2 has three experts, 0 and 1 one each: its sum begins with the first expert's.
    #[test]
    fn rows_are_summed_in_the_order_of_products() {
        let products = [
            gemm(0, &[(0, 2)], &[(0, 1), (2, 3)], Accumulate::Start),
            gemm(1, &[(3, 4)], &[(1, 2)], Accumulate::Start),
            gemm(1, &[(2, 3)], &[(2, 3)], Accumulate::Continue),
            gemm(2, &[(4, 5)], &[(2, 3)], Accumulate::Continue),
        ];
        let launch = &GroupedLaunch::of(&products)[0];
        let places = Places::of(launch);
        assert_eq!(launch.problems.iter().map(|problem| problem.product).collect::<Vec<_>>(), [0, 1, 3]);
        let rows = |source, first, to, count| ProblemRows { source, first, to, count };
        assert_eq!(places.problems[1], [rows(0, 2, 2, 2)]);
        // (row in memory, row of the result)
        assert_eq!(terms(launch), [(0, 0), (1, 2), (3, 1), (2, 2), (4, 2)]);
    }

    /// Rows that are not neighbours, of results that are.
    #[test]
    fn rows_are_gathered_in_the_order_of_their_results() {
        let scattered: Vec<_> = (0..100).map(|row| (2 * row, 2 * row + 1)).collect();
        let products = [
            gemm(0, &scattered, &[(0, 100)], Accumulate::Start),
            gemm(3, &[(201, 300)], &[(100, 199)], Accumulate::Start),
        ];
        let launch = &GroupedLaunch::of(&products)[0];
        assert!(launch.gathers);
        let places = Places::of(launch);
        let mut steps = Vec::new();
        places.gathers.each(|some| steps.extend_from_slice(some));
        assert_eq!(steps.len(), 101);
        assert_eq!((steps[99], steps[100]), (step(0, 198, 99, 1), step(0, 201, 100, 99)));
        assert_eq!(places.problems[0], [ProblemRows { source: 0, first: 0, to: 0, count: 100 }]);
        assert_eq!(places.problems[1], [ProblemRows { source: 0, first: 100, to: 100, count: 99 }]);
    }
}
