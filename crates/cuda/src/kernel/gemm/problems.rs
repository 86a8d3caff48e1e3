//! The problems of a grouped GEMM: where their rows lie and go, and what no kernel takes.

use counterpoint_tiles::gemm::{BLOCK, GemmLayout};

use super::rows::GemmKSource;
use super::{GemmFault, GemmGrid, ProblemFault};
use crate::kernel::{ElementType, Scalar};

/// Some rows of one of A's tensors, and the rows of D that they become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProblemRows {
    /// Which tensor.
    pub source: usize,
    /// The first row of it; where A lies along m, its column.
    pub first: usize,
    /// The first row of D.
    pub to: usize,
    /// How many.
    pub count: usize,
}

/// Where a block of k lies, 64 rows: of A and of B, the tensor and the first row of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProblemKBlock {
    /// Of A.
    pub a: (usize, usize),
    /// Of B: its first tensor, or the second.
    pub b: (usize, usize),
}

/// One of the products.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GemmProblem {
    /// Its rows. They lie together in A, whichever way they go.
    pub rows: Vec<ProblemRows>,
    /// The first of its rows of B.
    pub b_row: usize,
    /// Where A lies along m, its blocks of k; what lies in the last one behind the problem's rows is zeros.
    pub k_blocks: Vec<ProblemKBlock>,
}

/// Products that have a layout, columns and types in common, as one launch computes them. Sums are f32, in the order of k: no bit of a
/// result depends on what else is computed together with it.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedGemmSpec {
    /// Columns of D.
    pub n: usize,
    /// K, unless A lies along m.
    pub k: usize,
    /// Where A lies along m, its columns.
    pub m: usize,
    /// How A and B lie in memory.
    pub layout: GemmLayout,
    /// Elements of A and B.
    pub element: ElementType,
    /// Elements of D: that type, or f32.
    pub output: Scalar,
    /// Elements from one row in memory to the next, of A, B and D.
    pub strides: [usize; 3],
    /// Rows of each of A's tensors.
    pub rows_a: Vec<usize>,
    /// Rows of B; where A lies along m, also those of a second tensor.
    pub rows_b: Vec<usize>,
    /// Rows of D.
    pub rows_d: usize,
    /// Whether products are added to what D holds.
    pub adds: bool,
    /// The products, each with rows.
    pub problems: Vec<GemmProblem>,
    /// Multiprocessors to leave to others, by a grid that is persistent.
    pub sm_margin: u32,
    /// How many CTAs compute it.
    pub grid: GemmGrid,
}

/// Tensors that A may lie in.
const SOURCES: usize = 2;

impl GroupedGemmSpec {
    /// Multiplications and additions.
    pub fn flops(&self) -> f64 {
        let of = |problem: &GemmProblem| self.rows_of(problem) as f64 * self.k_of(problem) as f64;
        2.0 * self.n as f64 * self.problems.iter().map(of).sum::<f64>()
    }

    pub(super) fn rows_of(&self, problem: &GemmProblem) -> usize {
        problem.rows.iter().map(|rows| rows.count).sum()
    }

    pub(super) fn blocks_of(&self, problem: &GemmProblem) -> usize {
        if self.layout == GemmLayout::Tn { problem.k_blocks.len() } else { self.k.div_ceil(BLOCK) }
    }

    pub(super) fn k_of(&self, problem: &GemmProblem) -> usize {
        if self.layout == GemmLayout::Tn { problem.k_blocks.len() * BLOCK } else { self.k }
    }

    /// Whether the kernel takes results of such rows, and of such a K. It depends on nothing else of a product, so all of a pass are
    /// computed by one kernel or by another.
    pub fn takes(
        layout: GemmLayout,
        columns: [usize; 3],
        k: usize,
        element: ElementType,
        output: Scalar,
    ) -> bool {
        let bytes = [element.bytes() as u64, element.bytes() as u64, output.bytes()];
        let whole =
            columns.iter().zip(bytes).all(|(&columns, bytes)| (columns as u64 * bytes).is_multiple_of(16));
        // Behind a problem's rows of B lie the next one's.
        let ends = layout != GemmLayout::Nn || k.is_multiple_of(BLOCK);
        whole && ends && (output == Scalar::F32 || output == element.scalar())
    }

    /// Why no kernel takes it.
    pub(super) fn check(&self) -> Result<(), GemmFault> {
        /// As of one product.
        const MOST: usize = 1 << 22;
        let along_m = self.layout == GemmLayout::Tn;
        let columns = [if along_m { self.m } else { self.k }, self.layout.b_dims(self.n, self.k)[1], self.n];
        for (name, size) in [("n", self.n), (if along_m { "m" } else { "k" }, columns[0])] {
            if size == 0 || size > MOST {
                return Err(GemmFault::Size { name, size, most: MOST });
            }
        }
        if !Self::takes(self.layout, self.strides, self.k, self.element, self.output) {
            return Err(GemmFault::GroupedStrides { strides: self.strides, k: self.k });
        }
        if self.strides.iter().zip(columns).any(|(&stride, columns)| stride < columns) {
            return Err(GemmFault::GroupedOverlap { strides: self.strides, columns });
        }
        let tensors_b = if along_m { 1..=2 } else { 1..=1 };
        if !(1..=SOURCES).contains(&self.rows_a.len()) || !tensors_b.contains(&self.rows_b.len()) {
            return Err(GemmFault::GroupedTensors { a: self.rows_a.len(), b: self.rows_b.len() });
        }
        if self.problems.is_empty() {
            return Err(GemmFault::NoProblems);
        }
        self.problems.iter().enumerate().try_for_each(|(index, problem)| {
            self.check_problem(problem).map_err(|fault| GemmFault::Problem { index, fault })
        })
    }

    fn check_problem(&self, problem: &GemmProblem) -> Result<(), ProblemFault> {
        let along_m = self.layout == GemmLayout::Tn;
        let rows_in =
            |tensor: usize, rows: &[usize], end: usize| rows.get(tensor).is_some_and(|all| end <= *all);
        for rows in &problem.rows {
            let end = rows.first + rows.count;
            let source = if along_m { end <= self.m } else { rows_in(rows.source, &self.rows_a, end) };
            if rows.count == 0 || !source || rows.to + rows.count > self.rows_d {
                return Err(ProblemFault::Rows);
            }
            if along_m && !(rows.first * self.element.bytes()).is_multiple_of(16) {
                return Err(ProblemFault::Columns);
            }
        }
        if problem.rows.is_empty() || self.blocks_of(problem) == 0 {
            return Err(ProblemFault::Nothing);
        }
        let meet = |rows: &[ProblemRows]| {
            (rows[0].source, rows[0].first + rows[0].count) == (rows[1].source, rows[1].first)
        };
        if !problem.rows.windows(2).all(meet) {
            return Err(ProblemFault::Apart);
        }
        let b_rows = match self.layout {
            GemmLayout::Nt => self.n,
            GemmLayout::Nn => self.k,
            GemmLayout::Tn => 0,
        };
        if !along_m && problem.b_row + b_rows > self.rows_b[0] {
            return Err(ProblemFault::RowsOfB);
        }
        // Past a tensor's end there are zeros.
        let begins = |(tensor, row): (usize, usize), rows: &[usize]| rows_in(tensor, rows, row + 1);
        if problem
            .k_blocks
            .iter()
            .any(|block| !begins(block.a, &self.rows_a) || !begins(block.b, &self.rows_b))
        {
            return Err(ProblemFault::RowsOfK);
        }
        Ok(())
    }

    /// The blocks of k of all problems, A's and B's places in turn.
    pub(super) fn k_sources(&self) -> Vec<GemmKSource> {
        let place = |(source, row): (usize, usize)| GemmKSource { source: source as u32, row: row as u32 };
        let k_sources = self.problems.iter().flat_map(|problem| &problem.k_blocks);
        k_sources.flat_map(|block| [place(block.a), place(block.b)]).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Problems of so many rows. Of each the rows lie in two tensors in turn; those of D follow each other, or every third one of them those
    /// of the next problem.
    pub(in super::super) fn spec(rows: &[usize]) -> GroupedGemmSpec {
        let mut to = 0;
        let problem = |(index, &count): (usize, &usize)| {
            to += count;
            let rows =
                |first: usize, to: usize, count: usize| ProblemRows { source: index % 2, first, to, count };
            let begin = to - count;
            let rows = match index {
                // Behind each other in A, the other way round in D.
                2 => vec![rows(begin, begin + 70, 58), rows(begin + 58, begin, 70)],
                _ => vec![rows(begin, begin, count)],
            };
            GemmProblem { rows, b_row: index * 640, k_blocks: Vec::new() }
        };
        let problems: Vec<_> = rows.iter().enumerate().map(problem).collect();
        GroupedGemmSpec {
            n: 640,
            k: 192,
            m: 0,
            layout: GemmLayout::Nt,
            element: ElementType::Bf16,
            output: Scalar::Bf16,
            strides: [192, 192, 640],
            rows_a: vec![to, to],
            rows_b: vec![640 * rows.len()],
            rows_d: to,
            adds: false,
            problems,
            sm_margin: 0,
            grid: GemmGrid::Persistent,
        }
    }

    #[test]
    fn what_no_kernel_takes_is_refused() {
        let wrong = |change: fn(&mut GroupedGemmSpec)| {
            let mut spec = spec(&[100, 60]);
            change(&mut spec);
            spec.check().unwrap_err().to_string()
        };
        assert!(wrong(|spec| spec.problems[1].rows[0].to = 110).contains("rows that are not there"));
        assert!(wrong(|spec| spec.problems[1].b_row = 700).contains("rows of B"));
        let scattered = |spec: &mut GroupedGemmSpec| {
            let row = ProblemRows { source: 0, first: 3, to: 5, count: 1 };
            spec.problems[0].rows = vec![row, ProblemRows { to: 7, ..row }];
        };
        assert!(wrong(scattered).contains("follow each other"));
        assert!(wrong(|spec| spec.strides[2] = 644).contains("pad them"));
        assert!(wrong(|spec| spec.problems.clear()).contains("no problems"));
        let takes =
            |k| GroupedGemmSpec::takes(GemmLayout::Nn, [k, 64, 64], k, ElementType::Bf16, Scalar::F32);
        assert!(takes(128) && !takes(136));
    }
}
