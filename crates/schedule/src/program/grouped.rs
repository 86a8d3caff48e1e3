//! How a device with tiles runs the problems of a grouped GEMM: which of them one launch computes, and which rows are copied for it.

use std::ops::Range;

use super::{Accumulate, BufferId, Gemm, GemmLayout};

/// Problems of a [`WaveGemm`](super::WaveGemm) that one launch computes: neighbours that have a layout and a result in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedLaunch {
    /// Its products.
    pub products: Range<usize>,
    /// Its problems: products that follow each other with the same second operand are one. None where the result's rows are columns of
    /// the first operand ([`GemmLayout::Tn`]): there each product is one.
    pub problems: Vec<GroupedProblem>,
    /// Whether the first operand's rows are copied to where they lie together first: those of a problem do not follow each other.
    pub gathers: bool,
    /// The way of its results.
    pub results: GroupedResults,
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedProblem {
    /// One of its products: its second operand is theirs.
    pub product: usize,
    /// Its rows, in the order in which they are multiplied.
    pub rows: Vec<GroupedRows>,
}

/// Rows that lie together, and whose results do: of a buffer and a result with fewer than 2^32. Small, for a routing has tens of thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedRows {
    /// Where they lie.
    pub buffer: BufferId,
    /// The first of them there.
    pub first: u32,
    /// The first row of the result.
    pub to: u32,
    /// How many.
    pub count: u32,
    /// Number of the product that they are of.
    pub product: u32,
}

/// The way of the results of a [`GroupedLaunch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupedResults {
    /// They are stored where they belong.
    InPlace,
    /// They are stored together, and copied where they belong.
    Copied,
    /// They are stored together, and those of the same row are summed in the order of the products.
    Summed,
}

impl GroupedLaunch {
    /// Rows of half a tile: with no more rows a tile takes about half of the time.
    pub const HALF_ROWS: usize = 64;
    /// Rows of the result that lie together on average, unless they are copied: each such range is stored by itself, which took 81 us in
    /// ranges of 4 rows on an H200, and 103 of 2, where all together and a copy took 90 (`docs/experiments/033-scattered-rows.md`).
    const LEAST_ROWS: usize = 4;

    /// The launches of some products.
    pub fn of(products: &[Gemm]) -> Vec<Self> {
        Self::parts(products).map(|numbers| Self::of_part(numbers, products)).collect()
    }

    /// The numbers of the products of each launch.
    pub fn parts(products: &[Gemm]) -> impl Iterator<Item = Range<usize>> {
        let mut first = 0;
        products.chunk_by(Self::joins).map(move |part| {
            first += part.len();
            first - part.len()..first
        })
    }

    /// Whether one launch computes both of two products that follow each other.
    pub fn joins(one: &Gemm, next: &Gemm) -> bool {
        one.out == next.out && one.layout == next.layout
    }

    /// The launch of those with these numbers, one of [`GroupedLaunch::parts`].
    pub fn of_part(numbers: Range<usize>, products: &[Gemm]) -> Self {
        let (first, products) = (numbers.start, &products[numbers.clone()]);
        if products[0].layout == GemmLayout::Tn {
            let results = GroupedResults::InPlace;
            return Self { products: numbers, problems: Vec::new(), gathers: false, results };
        }
        let mut problems: Vec<GroupedProblem> = Vec::new();
        for (product, gemm) in numbers.clone().zip(products) {
            let same = problems.last().is_some_and(|problem| products[problem.product - first].b == gemm.b);
            if !same {
                problems.push(GroupedProblem { product, rows: Vec::new() });
            }
            if let Some(problem) = problems.last_mut() {
                add_pieces(product, gemm, &mut problem.rows);
            }
        }
        let sums = products.iter().any(|gemm| gemm.accumulate == Accumulate::Continue);
        let results = match sums {
            true => GroupedResults::Summed,
            false if Self::has_short_results(&problems) => GroupedResults::Copied,
            false => GroupedResults::InPlace,
        };
        if results != GroupedResults::InPlace {
            // The fewer ranges where they lie, the better.
            problems.iter_mut().for_each(GroupedProblem::sort);
        }
        // Loads by boxes of 64 rows and fewer take 1.7 to 21 times as long as a copy and loads of whole tiles.
        let source = products[0].a.first().map(|block| block.buffer);
        let follows = |problem: &GroupedProblem| {
            problem.rows.first().is_none_or(|rows| Some(rows.buffer) == source)
                && problem.rows.windows(2).all(|pair| pair[0].source_precedes(&pair[1]))
        };
        let gathers = !problems.iter().all(follows);
        Self { products: numbers, problems, gathers, results }
    }

    /// Whether results are in ranges that are shorter on average than what is stored where it belongs.
    fn has_short_results(problems: &[GroupedProblem]) -> bool {
        let ranges = |problem: &GroupedProblem| problem.rows.chunk_by(GroupedRows::result_precedes).count();
        let (count, ranges): (usize, usize) = problems
            .iter()
            .map(|problem| (problem.count(), ranges(problem)))
            .fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        count < Self::LEAST_ROWS * ranges
    }

    /// Rows of all problems.
    pub fn rows(&self) -> usize {
        self.problems.iter().map(GroupedProblem::count).sum()
    }

    /// Half-tiles of rows of all problems.
    pub fn half_tiles(&self) -> usize {
        self.problems.iter().map(|problem| problem.count().div_ceil(Self::HALF_ROWS)).sum()
    }
}

impl GroupedProblem {
    /// Puts its rows in the order in which they lie.
    fn sort(&mut self) {
        if self.rows.is_sorted_by_key(GroupedRows::source) {
            return;
        }
        if let Some(sorted) = self.by_places() {
            self.rows = sorted;
        } else {
            self.rows.sort_by_key(GroupedRows::source);
        }
    }

    /// Its rows in order, where every row of a buffer has a place of its own: an expert's rows lie together, each in one product or another.
    fn by_places(&self) -> Option<Vec<GroupedRows>> {
        let (buffer, mut first) = self.rows.first()?.source();
        let mut last = first;
        for rows in &self.rows {
            if rows.buffer != buffer {
                return None;
            }
            (first, last) = (first.min(rows.first), last.max(rows.first));
        }
        let span = (last - first) as usize;
        if span >= 4 * self.rows.len() {
            return None;
        }
        let nothing = GroupedRows { buffer, first, to: 0, count: 0, product: 0 };
        let mut sorted = vec![nothing; span + 1];
        for rows in &self.rows {
            let place = &mut sorted[(rows.first - first) as usize];
            if place.count > 0 {
                return None;
            }
            *place = *rows;
        }
        // Mostly every place has its row.
        if sorted.len() > self.rows.len() {
            sorted.retain(|rows| rows.count > 0);
        }
        Some(sorted)
    }

    /// Its rows.
    pub fn count(&self) -> usize {
        self.rows.iter().map(|rows| rows.count as usize).sum()
    }
}

impl GroupedRows {
    /// Where they lie, and the first of them there.
    fn source(&self) -> (BufferId, u32) {
        (self.buffer, self.first)
    }

    /// Whether others follow them where they lie.
    pub fn source_precedes(&self, next: &Self) -> bool {
        self.buffer == next.buffer && self.first + self.count == next.first
    }

    /// Whether others follow them in the result.
    pub fn result_precedes(&self, next: &Self) -> bool {
        self.to + self.count == next.to
    }
}

/// Adds the rows of a product, cut wherever they or their results end.
fn add_pieces(product: usize, gemm: &Gemm, rows: &mut Vec<GroupedRows>) {
    rows.reserve(gemm.a.len().max(gemm.out_rows.len()));
    let of_product = product as u32;
    if let [out] = gemm.out_rows[..] {
        // Tokens of an expert, one by one.
        let mut to = out.start as u32;
        for block in &gemm.a {
            let (first, count) = (block.rows.start as u32, block.rows.len() as u32);
            rows.push(GroupedRows { buffer: block.buffer, first, to, count, product: of_product });
            to += count;
        }
        return;
    }
    let mut results = gemm.out_rows.iter().copied();
    let mut to = results.next();
    for block in &gemm.a {
        let mut at = block.rows.start;
        while at < block.rows.end {
            let Some(out) = &mut to else { return };
            let count = (block.rows.end - at).min(out.len());
            rows.push(GroupedRows {
                buffer: block.buffer,
                first: at as u32,
                to: out.start as u32,
                count: count as u32,
                product: of_product,
            });
            (at, out.start) = (at + count, out.start + count);
            if out.is_empty() {
                to = results.next();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range as Rows;

    use super::super::RowBlock;
    use super::*;

    fn gemm(
        expert: usize,
        a: &[(usize, usize, usize)],
        out: &[(usize, usize)],
        accumulate: Accumulate,
    ) -> Gemm {
        let block = |&(buffer, start, end): &(usize, usize, usize)| RowBlock {
            buffer: BufferId(buffer),
            rows: Rows::new(start, end),
        };
        Gemm {
            layout: GemmLayout::Nt,
            a: a.iter().map(block).collect(),
            b: vec![block(&(9, 64 * expert, 64 * expert + 64))],
            out: BufferId(8),
            out_rows: out.iter().map(|&(start, end)| Rows::new(start, end)).collect(),
            pass_rows: 1000,
            columns: None,
            bias: None,
            accumulate,
        }
    }

    /// Tokens one by one become rows that lie together.
    #[test]
    fn scattered_rows_are_gathered_for_all_problems() {
        let scattered: Vec<_> = (0..200).map(|row| (0, 2 * row, 2 * row + 1)).collect();
        let products = [
            gemm(0, &scattered, &[(0, 200)], Accumulate::Start),
            gemm(1, &[(1, 0, 300)], &[(200, 500)], Accumulate::Start),
        ];
        let launches = GroupedLaunch::of(&products);
        assert_eq!(launches.len(), 1);
        let launch = &launches[0];
        assert_eq!((launch.gathers, launch.results), (true, GroupedResults::InPlace));
        assert_eq!((launch.rows(), launch.half_tiles(), launch.problems.len()), (500, 4 + 5, 2));
        let last = launch.problems[0].rows[199];
        assert_eq!(last, GroupedRows { buffer: BufferId(0), first: 398, to: 199, count: 1, product: 0 });
        // Those of a problem that follow each other stay where they are.
        let gathers = |a: &[(usize, usize, usize)]| {
            GroupedLaunch::of(&[gemm(0, a, &[(0, 200)], Accumulate::Start)])[0].gathers
        };
        assert!(!gathers(&[(0, 0, 100), (0, 100, 200)]));
        assert!(gathers(&[(0, 0, 100), (0, 101, 201)]) && gathers(&[(0, 0, 100), (1, 100, 200)]));
    }

    /// An expert's rows of tokens that have another expert before it are added to what that gave.
    #[test]
    fn rows_of_an_expert_are_one_problem_whatever_becomes_of_them() {
        let products = [
            gemm(0, &[(0, 0, 4)], &[(0, 2), (5, 7)], Accumulate::Start),
            gemm(1, &[(0, 4, 5), (0, 7, 8)], &[(2, 3), (4, 5)], Accumulate::Start),
            gemm(1, &[(0, 5, 7)], &[(0, 1), (6, 7)], Accumulate::Continue),
        ];
        let launches = GroupedLaunch::of(&products);
        let launch = &launches[0];
        assert_eq!((launch.gathers, launch.results), (false, GroupedResults::Summed));
        let rows = |problem: usize| -> Vec<_> {
            let rows = launch.problems[problem].rows.iter();
            rows.map(|rows| (rows.first, rows.to, rows.count, rows.product)).collect()
        };
        assert_eq!(rows(0), [(0, 0, 2, 0), (2, 5, 2, 0)]);
        assert_eq!(rows(1), [(4, 2, 1, 1), (5, 0, 1, 2), (6, 6, 1, 2), (7, 4, 1, 1)]);
        assert_eq!(launch.half_tiles(), 2);
    }

    /// Rows that are far apart, come twice or from two buffers are sorted too.
    #[test]
    fn rows_are_taken_in_the_order_in_which_they_lie() {
        let sources = |first: &[(usize, usize, usize)], second: &[(usize, usize, usize)]| -> Vec<_> {
            let ends = |blocks: &[(usize, usize, usize)]| -> usize { blocks.iter().map(|b| b.2 - b.1).sum() };
            let products = [
                gemm(0, first, &[(0, ends(first))], Accumulate::Start),
                gemm(0, second, &[(0, ends(second))], Accumulate::Continue),
            ];
            let launch = &GroupedLaunch::of(&products)[0];
            let rows = launch.problems[0].rows.iter();
            rows.map(|rows| (rows.buffer.0, rows.first, rows.count)).collect()
        };
        assert_eq!(sources(&[(0, 3, 4), (0, 5, 9)], &[(0, 4, 5)]), [(0, 3, 1), (0, 4, 1), (0, 5, 4)]);
        assert_eq!(sources(&[(0, 300, 301)], &[(0, 4, 5)]), [(0, 4, 1), (0, 300, 1)]);
        assert_eq!(sources(&[(0, 5, 6), (0, 4, 5)], &[(0, 5, 6)]), [(0, 4, 1), (0, 5, 1), (0, 5, 1)]);
        assert_eq!(sources(&[(1, 5, 6)], &[(0, 6, 7)]), [(0, 6, 1), (1, 5, 1)]);
    }

    #[test]
    fn results_one_by_one_are_copied_and_others_begin_launches() {
        let scattered: Vec<_> = (0..200).map(|row| (2 * row, 2 * row + 1)).collect();
        let one = gemm(0, &[(0, 0, 200)], &scattered, Accumulate::Start);
        let other = Gemm { out: BufferId(7), ..one.clone() };
        let launches = GroupedLaunch::of(&[one, other.clone(), other]);
        assert_eq!(launches.iter().map(|launch| launch.products.clone()).collect::<Vec<_>>(), [0..1, 1..3]);
        assert_eq!((launches[0].gathers, launches[0].results), (false, GroupedResults::Copied));
        assert_eq!((launches[0].half_tiles(), launches[1].problems.len()), (4, 1));
        // Ranges of some rows are stored where they belong.
        let ranges: Vec<_> = (0..20).map(|range| (20 * range, 20 * range + 10)).collect();
        let launch = &GroupedLaunch::of(&[gemm(0, &[(0, 0, 200)], &ranges, Accumulate::Start)])[0];
        assert_eq!((launch.results, launch.half_tiles()), (GroupedResults::InPlace, 4));
    }
}
