//! How a device with tiles runs the problems of a grouped GEMM: which of them one launch computes, and which rows are copied for it.

use std::ops::Range;
use std::sync::Arc;

use counterpoint_mask::Range as Rows;

use super::rows::ranges_of;
use super::{Accumulate, BufferId, Gemm, GemmLayout, RowBlock, RowBlocks, RowList, RowNumbers};

/// Problems of a [`WaveGemm`](super::WaveGemm) that one launch computes: neighbours that have a layout and a result in common.
#[derive(Clone, Debug)]
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
#[derive(Clone, Debug)]
pub struct GroupedProblem {
    /// One of its products: its second operand is theirs.
    pub product: usize,
    /// Its rows, in the order in which they are multiplied.
    pub rows: RowBlocks,
    /// Where their results go, product by product.
    pub results: Vec<GroupedRows>,
}

/// Rows of a problem, and where their results go. A routing has tens of thousands of each.
#[derive(Clone, Debug)]
pub struct GroupedRows {
    /// Number of the product that they are of.
    pub product: usize,
    /// Which of the problem's rows they are.
    pub at: RowNumbers,
    /// The rows of the result, as many.
    pub to: RowNumbers,
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
                problems.push(GroupedProblem { product, rows: RowBlocks::default(), results: Vec::new() });
            }
            if let Some(problem) = problems.last_mut() {
                problem.add(product, gemm);
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
        let source = products[0].a.pieces().first().map(|piece| piece.buffer);
        let follows = |problem: &GroupedProblem| {
            problem.rows.is_empty() || problem.rows.together().map(|block| block.buffer) == source
        };
        let gathers = !problems.iter().all(follows);
        Self { products: numbers, problems, gathers, results }
    }

    /// Whether results are in ranges that are shorter on average than what is stored where it belongs.
    fn has_short_results(problems: &[GroupedProblem]) -> bool {
        let counts = problems.iter().map(|problem| (problem.rows.count(), problem.result_ranges()));
        let (count, ranges) = counts.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        count < Self::LEAST_ROWS * ranges
    }

    /// Rows of all problems.
    pub fn rows(&self) -> usize {
        self.problems.iter().map(|problem| problem.rows.count()).sum()
    }

    /// Half-tiles of rows of all problems.
    pub fn half_tiles(&self) -> usize {
        self.problems.iter().map(|problem| problem.rows.count().div_ceil(Self::HALF_ROWS)).sum()
    }
}

impl GroupedProblem {
    /// Adds the rows of a product.
    fn add(&mut self, product: usize, gemm: &Gemm) {
        let mut end = self.rows.count();
        self.rows.extend(&gemm.a);
        for to in gemm.out_rows.pieces() {
            let at = RowNumbers::Range(Rows::new(end, end + to.count()));
            end += to.count();
            self.results.push(GroupedRows { product, at, to: to.clone() });
        }
    }

    /// How many ranges its results lie in.
    fn result_ranges(&self) -> usize {
        let (mut count, mut end) = (0, None);
        for rows in ranges_of(self.results.iter().map(|rows| &rows.to)) {
            count += usize::from(end != Some(rows.start));
            end = Some(rows.end);
        }
        count
    }

    /// Puts its rows in the order in which they lie.
    fn sort(&mut self) {
        if self.rows.ascend() {
            return;
        }
        let (rows, places) = by_places(&self.rows).unwrap_or_else(|| by_sorting(&self.rows));
        let places = Arc::new(places);
        for GroupedRows { at, .. } in &mut self.results {
            if let RowNumbers::Range(part) = at
                && let Some(list) = RowList::new(&places, *part)
            {
                *at = RowNumbers::List(list);
            }
        }
        self.rows = rows;
    }
}

/// Rows in order, and the place that each has there.
type Sorted = (RowBlocks, Vec<u32>);

/// Those of one buffer that has a place of its own for every row: an expert's rows lie together, each in one product or another.
fn by_places(rows: &RowBlocks) -> Option<Sorted> {
    let buffer = rows.pieces().first()?.buffer;
    if rows.pieces().iter().any(|piece| piece.buffer != buffer) {
        return None;
    }
    let mut numbers = rows.numbers();
    let (first, last) =
        numbers.iter().fold((u32::MAX, 0), |(first, last), row| (first.min(*row), last.max(*row)));
    let span = (last - first) as usize + 1;
    if span >= 4 * numbers.len() {
        return None;
    }
    let mut places = vec![0u32; span];
    numbers.iter_mut().for_each(|row| *row -= first);
    numbers.iter().for_each(|row| places[*row as usize] += 1);
    if places.iter().any(|count| *count > 1) {
        return None;
    }
    if span == numbers.len() {
        let all = Rows { start: first as usize, end: last as usize + 1 };
        return Some((vec![RowBlock { buffer, rows: all }].into(), numbers));
    }
    let mut sorted = Vec::with_capacity(numbers.len());
    for (row, place) in (first..).zip(&mut places) {
        let is_there = *place > 0;
        *place = sorted.len() as u32;
        if is_there {
            sorted.push(row);
        }
    }
    numbers.iter_mut().for_each(|row| *row = places[*row as usize]);
    let all = Rows::new(0, sorted.len());
    let mut rows = RowBlocks::default();
    rows.push_list(buffer, RowList::new(&Arc::new(sorted), all));
    Some((rows, numbers))
}

/// Any, by comparisons.
fn by_sorting(rows: &RowBlocks) -> Sorted {
    let buffers =
        rows.pieces().iter().flat_map(|piece| std::iter::repeat_n(piece.buffer, piece.rows.count()));
    let mut sorted: Vec<(BufferId, u32, usize)> =
        buffers.zip(rows.numbers()).enumerate().map(|(at, (buffer, row))| (buffer, row, at)).collect();
    sorted.sort_unstable();
    let mut places = vec![0; sorted.len()];
    (0..).zip(&sorted).for_each(|(place, (_, _, at))| places[*at] = place);
    let row = |&(buffer, row, _): &(BufferId, u32, usize)| RowBlock {
        buffer,
        rows: Rows::new(row as usize, row as usize + 1),
    };
    (sorted.iter().map(row).collect(), places)
}

#[cfg(test)]
mod tests {
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
            b: vec![block(&(9, 64 * expert, 64 * expert + 64))].into(),
            out: BufferId(8),
            out_rows: out.iter().map(|&(start, end)| Rows::new(start, end)).collect(),
            pass_rows: 1000,
            columns: None,
            bias: None,
            accumulate,
        }
    }

    /// Of each row of a problem its buffer and row, that of its result, and its product.
    fn flat(problem: &GroupedProblem) -> Vec<(usize, usize, u32, usize)> {
        let blocks = problem.rows.iter();
        let rows =
            blocks.flat_map(|block| (block.rows.start..block.rows.end).map(move |row| (block.buffer.0, row)));
        let mut flat: Vec<_> = rows.map(|(buffer, row)| (buffer, row, u32::MAX, 0)).collect();
        for GroupedRows { product, at, to } in &problem.results {
            at.each_with(to, |at, to| (flat[at as usize].2, flat[at as usize].3) = (to, *product));
        }
        flat
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
        assert_eq!(flat(&launch.problems[0])[199], (0, 398, 199, 0));
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
        let wanted = [(0, 0, 0, 0), (0, 1, 1, 0), (0, 2, 5, 0), (0, 3, 6, 0)];
        assert_eq!(flat(&launch.problems[0]), wanted);
        let wanted = [(0, 4, 2, 1), (0, 5, 0, 2), (0, 6, 6, 2), (0, 7, 4, 1)];
        assert_eq!(flat(&launch.problems[1]), wanted);
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
            // Each row's place among those that were given, by what becomes of it.
            let given = products.iter().flat_map(|gemm| gemm.a.iter().collect::<Vec<_>>());
            let given = given
                .flat_map(|block| (block.rows.start..block.rows.end).map(move |row| (block.buffer.0, row)));
            let given: Vec<_> = given.collect();
            let flat = flat(&GroupedLaunch::of(&products)[0].problems[0]);
            for &(buffer, row, to, product) in &flat {
                assert_eq!(given[to as usize + product * ends(first)], (buffer, row));
            }
            flat.into_iter().map(|(buffer, row, ..)| (buffer, row)).collect()
        };
        let wanted = [(0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (0, 8)];
        assert_eq!(sources(&[(0, 3, 4), (0, 5, 9)], &[(0, 4, 5)]), wanted);
        assert_eq!(sources(&[(0, 3, 4), (0, 6, 7)], &[(0, 4, 5)]), [(0, 3), (0, 4), (0, 6)]);
        assert_eq!(sources(&[(0, 300, 301)], &[(0, 4, 5)]), [(0, 4), (0, 300)]);
        assert_eq!(sources(&[(0, 5, 6), (0, 4, 5)], &[(0, 5, 6)]), [(0, 4), (0, 5), (0, 5)]);
        assert_eq!(sources(&[(1, 5, 6)], &[(0, 6, 7)]), [(0, 6), (1, 5)]);
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
