//! The problems of a grouped GEMM: where their rows lie and go, their tiles, and in which shape these are computed fastest.

use bytemuck::NoUninit;
use counterpoint_tiles::gemm::{
    self as tiles, BLOCK, GemmLayout, GemmShape, TILE_ROWS, TileOrder, TilePair, Warpgroups,
};

use super::rows::{GemmTerm, GemmTile, RowTile};
use super::shape::TilingCost;
use super::source::TILES_OF_PROBLEMS;
use super::{GemmGrid, GemmSpec};
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
pub struct ProblemTerm {
    /// Of A.
    pub a: (usize, usize),
    /// Of B: its first tensor, or the second.
    pub b: (usize, usize),
}

/// One of the products.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GemmProblem {
    /// Its rows.
    pub rows: Vec<ProblemRows>,
    /// The first of its rows of B.
    pub b_row: usize,
    /// Where A lies along m, its blocks of k; what lies in the last one behind the problem's rows is zeros.
    pub terms: Vec<ProblemTerm>,
}

/// Products that have a layout, columns and types in common, as one launch computes them. Sums are f32, in the order of k: no bit of a
/// result depends on what else is computed together with it.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedGemmSpec {
    /// Columns of D.
    pub n: usize,
    /// Terms of each element, unless A lies along m.
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

/// `GemmBox` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit)]
#[repr(C)]
pub(super) struct GemmBox {
    /// Of A's tensor or D.
    pub(super) row: u32,
    /// Which of [`BOXES`]; of A, of [`GROUPED_SOURCES`] tensors each.
    pub(super) map: u32,
}

/// What of a tile is by boxes (`kBoxesOfD`, `kBoxesOfA`).
const BOXES_OF_D: u16 = 1;
const BOXES_OF_A: u16 = 2;
/// Tensors that A's rows may be put together from, unless A lies along m (`kGroupedSources`).
pub const GROUPED_SOURCES: usize = 2;
/// Maps of A with boxes; behind them are those of whole tiles.
pub(super) const BOX_MAPS: usize = GROUPED_SOURCES * BOXES.len();

/// Rows that are stored at once, box by box.
pub(super) const BOXES: [u32; 7] = [64, 32, 16, 8, 4, 2, 1];

/// A row of tiles, and its group: where its second 64 rows' boxes begin.
type ListedTile = (RowTile, u32);

/// A row of a problem: its tensor and row of A, and its row of D.
type ProblemRow = ((usize, u32), u32);

/// A unit: the tiles of both CTAs of a cluster.
pub(super) type ProblemUnit = [GemmTile; 2];

impl GroupedGemmSpec {
    /// Multiplications and additions.
    pub fn flops(&self) -> f64 {
        let of = |problem: &GemmProblem| self.rows_of(problem) as f64 * self.k_of(problem) as f64;
        2.0 * self.n as f64 * self.problems.iter().map(of).sum::<f64>()
    }

    fn rows_of(&self, problem: &GemmProblem) -> usize {
        problem.rows.iter().map(|rows| rows.count).sum()
    }

    fn blocks_of(&self, problem: &GemmProblem) -> usize {
        if self.layout == GemmLayout::Tn { problem.terms.len() } else { self.k.div_ceil(BLOCK) }
    }

    fn k_of(&self, problem: &GemmProblem) -> usize {
        if self.layout == GemmLayout::Tn { problem.terms.len() * BLOCK } else { self.k }
    }

    /// Whether the kernel takes results of such rows, and of so many terms. It depends on nothing else of a product, so all of a pass are
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
    pub(super) fn check(&self) -> Result<(), String> {
        /// As of one product.
        const MOST: usize = 1 << 22;
        let along_m = self.layout == GemmLayout::Tn;
        let columns = [if along_m { self.m } else { self.k }, self.layout.b_dims(self.n, self.k)[1], self.n];
        for (name, size) in [("n", self.n), (if along_m { "m" } else { "k" }, columns[0])] {
            if size == 0 || size > MOST {
                return Err(format!("{name} is {size}; it takes 1 to {MOST}"));
            }
        }
        if !Self::takes(self.layout, self.strides, self.k, self.element, self.output) {
            return Err(format!("rows are {:?} elements apart, of {} terms; pad them", self.strides, self.k));
        }
        if self.strides.iter().zip(columns).any(|(&stride, columns)| stride < columns) {
            return Err(format!("rows are {:?} elements apart, but have {columns:?}", self.strides));
        }
        let tensors_b = if along_m { 1..=2 } else { 1..=1 };
        if !(1..=GROUPED_SOURCES).contains(&self.rows_a.len()) || !tensors_b.contains(&self.rows_b.len()) {
            return Err(format!("{} tensors of A, {} of B", self.rows_a.len(), self.rows_b.len()));
        }
        if self.problems.is_empty() {
            return Err("no problems".to_owned());
        }
        self.problems.iter().try_for_each(|problem| self.check_problem(problem))
    }

    fn check_problem(&self, problem: &GemmProblem) -> Result<(), String> {
        let along_m = self.layout == GemmLayout::Tn;
        let refused = |what: &str| Err(format!("{what} of {problem:?}"));
        let rows_in =
            |tensor: usize, rows: &[usize], end: usize| rows.get(tensor).is_some_and(|all| end <= *all);
        for rows in &problem.rows {
            let end = rows.first + rows.count;
            let source = if along_m { end <= self.m } else { rows_in(rows.source, &self.rows_a, end) };
            if rows.count == 0 || !source || rows.to + rows.count > self.rows_d {
                return refused("rows that are not there");
            }
            if along_m && !(rows.first * self.element.bytes()).is_multiple_of(16) {
                return refused("columns that do not begin at 16 bytes");
            }
        }
        if problem.rows.is_empty() || self.blocks_of(problem) == 0 {
            return refused("nothing");
        }
        let b_rows = match self.layout {
            GemmLayout::Nt => self.n,
            GemmLayout::Nn => self.k,
            GemmLayout::Tn => 0,
        };
        if !along_m && problem.b_row + b_rows > self.rows_b[0] {
            return refused("rows of B that are not there");
        }
        // Past a tensor's end there are zeros.
        let begins = |(tensor, row): (usize, usize), rows: &[usize]| rows_in(tensor, rows, row + 1);
        if problem.terms.iter().any(|term| !begins(term.a, &self.rows_a) || !begins(term.b, &self.rows_b)) {
            return refused("terms that are not there");
        }
        Ok(())
    }

    /// The blocks of k of all problems, A's and B's places in turn.
    pub(super) fn terms(&self) -> Vec<GemmTerm> {
        let place = |(source, row): (usize, usize)| GemmTerm { source: source as u32, row: row as u32 };
        let terms = self.problems.iter().flat_map(|problem| &problem.terms);
        terms.flat_map(|term| [place(term.a), place(term.b)]).collect()
    }

    /// The tiles of a problem's rows, and one more for a unit that needs a second. Tiles whose rows do not lie together have their boxes in
    /// a list.
    fn row_tiles(&self, problem: &GemmProblem, pair: TilePair, boxes: &mut Vec<GemmBox>) -> Vec<ListedTile> {
        // A product's rows are fewer than 2^22.
        let of = |rows: &ProblemRows| {
            let ProblemRows { source, first, to, count } = *rows;
            (0..count as u32).map(move |row| ((source, first as u32 + row), to as u32 + row))
        };
        let rows: Vec<ProblemRow> = problem.rows.iter().flat_map(of).collect();
        let mut tiles = Vec::new();
        for rows in rows.chunks(TILE_ROWS) {
            let ((source, first), to) = rows[0];
            let mut tile = RowTile {
                source_row: first,
                destination_row: to,
                source: source as u16,
                destination: 0,
                rows: rows.len() as u32,
            };
            if self.layout != GemmLayout::Tn && pair == TilePair::Rows {
                tile.source += BOX_MAPS as u16;
            }
            let mut group = 0;
            let halves = || rows.chunks(TILE_ROWS / 2);
            if !rows.windows(2).all(|pair| pair[0].1 + 1 == pair[1].1) {
                let mut list = |rows: &[ProblemRow]| list_boxes(rows.iter().map(|row| (0, row.1)), 1, boxes);
                tile.destination |= BOXES_OF_D;
                tile.destination_row = halves().next().map_or(0, &mut list);
                group = halves().nth(1).map_or(0, list);
            }
            if self.layout != GemmLayout::Tn && !rows.windows(2).all(|pair| follows(pair[0].0, pair[1].0)) {
                let header = boxes.len();
                boxes.push(GemmBox { row: 0, map: 0 });
                // A list has 64 rows; of those that are too many any will do.
                let mut list = |half: usize| {
                    let rows = halves().nth(half).unwrap_or_default();
                    let more = (0..(TILE_ROWS / 2 - rows.len()) as u32).map(|row| (0, row));
                    list_boxes(rows.iter().map(|row| row.0).chain(more), GROUPED_SOURCES, boxes)
                };
                list(0);
                boxes[header].row = list(1);
                tile.destination |= BOXES_OF_A;
                tile.source_row = header as u32;
            }
            tiles.push((tile, group));
        }
        let empty = tiles.last().map(|&(last, group)| (RowTile { rows: 0, ..last }, group));
        tiles.extend(empty);
        tiles
    }

    /// The problems in the order in which they are begun: those with most terms first, so that the last units are short ones.
    fn in_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.problems.len()).collect();
        order.sort_by_key(|&problem| std::cmp::Reverse(self.blocks_of(&self.problems[problem])));
        order
    }

    /// All units, as `clusters` clusters take them in turn, and the boxes of their tiles.
    pub(super) fn units(
        &self,
        shape: &GemmShape,
        clusters: usize,
    ) -> Result<(Vec<ProblemUnit>, Vec<GemmBox>), String> {
        let mut first_terms = Vec::with_capacity(self.problems.len());
        let mut terms = 0;
        for problem in &self.problems {
            first_terms.push(terms);
            terms += problem.terms.len();
        }
        let (mut units, mut boxes) = (Vec::new(), Vec::new());
        for index in self.in_order() {
            let problem = &self.problems[index];
            let tiles = self.row_tiles(problem, shape.pair, &mut boxes);
            let first = if self.layout == GemmLayout::Tn { first_terms[index] } else { problem.b_row } as u32;
            let blocks = self.blocks_of(problem) as u32;
            let rows = (tiles.len() - 1) * TILE_ROWS;
            let rows_of: Vec<RowTile> = tiles.iter().map(|(tile, _)| *tile).collect();
            for unit in tiles::units(&TileOrder::Grouped, shape, rows, self.n)? {
                let [mut one, mut other] = GemmTile::of_unit(&unit, shape, &rows_of);
                let below = usize::from(shape.pair == TilePair::Rows);
                for (tile, down) in [(&mut one, 0), (&mut other, below)] {
                    let group = tiles[usize::from(unit.row_tile) + down].1;
                    *tile = GemmTile { group, first, blocks, ..*tile };
                }
                units.push([one, other]);
            }
        }
        if self.layout == GemmLayout::Tn {
            deal(&mut units, clusters);
        }
        Ok((units, boxes))
    }

    /// The shapes that there are kernels for, the one first that is estimated to be the fastest.
    pub(super) fn shapes(&self, sm_count: u32) -> Vec<GemmShape> {
        let all = TILES_OF_PROBLEMS.into_iter().flat_map(|(warpgroups, columns)| {
            let shape = |pair| GemmShape { warpgroups, ..GemmShape::whole(columns, pair) };
            [TilePair::Rows, TilePair::Columns].map(shape)
        });
        let workers = sm_count.saturating_sub(self.sm_margin).max(2);
        let mut all: Vec<(f64, GemmShape)> = all.map(|shape| (self.cost(shape, workers), shape)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all.into_iter().map(|(_, shape)| shape).collect()
    }

    /// An estimate of the time in cycles of a multiprocessor, as that of one product ([`TilingCost::cost`]).
    fn cost(&self, shape: GemmShape, workers: u32) -> f64 {
        /// Bytes from memory in a cycle, of all 132 multiprocessors.
        const MEMORY: f64 = 1400.0;
        /// Of the time of a block, what one warpgroup's rows take. Not measured.
        const HALF: f64 = 0.6;
        let [unit_rows, unit_columns] = shape.unit();
        let columns = self.n.div_ceil(unit_columns);
        let like = GemmSpec::new(2 * TILE_ROWS, self.n, self.k.max(1), self.layout, self.element);
        let (block, end) = (shape.block_cycles(&like), shape.end_cycles(self.output));
        let clusters = shape.clusters(workers).max(1) as usize;
        let (mut busy, mut next, mut elements) = (vec![0.0f64; clusters], 0, 0.0);
        let together = unit_rows / TILE_ROWS;
        for index in self.in_order() {
            let problem = &self.problems[index];
            let rows = self.rows_of(problem);
            let tiles = rows.div_ceil(TILE_ROWS);
            // Of a tile of few rows one warpgroup has none; where tiles lie one above the other the other one has more.
            let is_half = (1..=TILE_ROWS / 2).contains(&(rows % TILE_ROWS));
            let alone = shape.pair == TilePair::Columns && shape.warpgroups == Warpgroups::Cooperative;
            let halves = usize::from(is_half && alone);
            let blocks = self.blocks_of(problem) as f64 * block;
            let units = tiles.div_ceil(together) * columns;
            for unit in 0..units {
                let part = if unit >= units - halves * columns { HALF } else { 1.0 };
                busy[turn(next, clusters)] += part * blocks + end.0;
                next += 1;
            }
            elements += (self.rows_of(problem) + self.n) as f64 * self.k_of(problem) as f64;
        }
        let computing = busy.into_iter().fold(0.0, f64::max) + end.1;
        let loading = elements * self.element.bytes() as f64 / (MEMORY * f64::from(workers) / 132.0);
        (computing.powi(3) + loading.powi(3)).cbrt()
    }
}

/// Whether a row follows another in the same tensor.
fn follows((source, row): (usize, u32), next: (usize, u32)) -> bool {
    (source, row + 1) == next
}

/// Adds the boxes of some rows, each of a tensor, of `tensors`: the largest first of those that lie together. Where they begin.
fn list_boxes(rows: impl Iterator<Item = (usize, u32)>, tensors: usize, boxes: &mut Vec<GemmBox>) -> u32 {
    let begin = boxes.len() as u32;
    let rows: Vec<(usize, u32)> = rows.collect();
    for together in rows.chunk_by(|a, b| follows(*a, *b)) {
        let (tensor, mut row) = together[0];
        for (size, rows) in BOXES.into_iter().enumerate() {
            if together.len() as u32 & rows != 0 {
                boxes.push(GemmBox { row, map: (size * tensors + tensor) as u32 });
                row += rows;
            }
        }
    }
    begin
}

/// Which of so many clusters computes a unit: every other round goes backwards, so that who had the longest has the shortest next.
fn turn(unit: usize, clusters: usize) -> usize {
    let (round, place) = (unit / clusters, unit % clusters);
    if round % 2 == 0 { place } else { clusters - 1 - place }
}

/// Units, which clusters take in turn, for those that [`turn`] says.
fn deal<T>(units: &mut [T], clusters: usize) {
    units.chunks_exact_mut(clusters).skip(1).step_by(2).for_each(<[T]>::reverse);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Problems of so many rows. Of each the rows lie in two tensors in turn; those of D follow each other, or every third one of them those
    /// of the next problem.
    fn spec(rows: &[usize]) -> GroupedGemmSpec {
        let mut to = 0;
        let problem = |(index, &count): (usize, &usize)| {
            to += count;
            let rows =
                |first: usize, to: usize, count: usize| ProblemRows { source: index % 2, first, to, count };
            let begin = to - count;
            let rows = match index {
                // Behind each other in A, the other way round in D.
                2 => vec![rows(begin, begin + 70, 58), rows(begin + 58, begin, 70)],
                // The other way round in A, behind each other in D.
                3 => vec![rows(begin + 37, begin, 92), rows(begin, begin + 92, 37)],
                _ => vec![rows(begin, begin, count)],
            };
            GemmProblem { rows, b_row: index * 640, terms: Vec::new() }
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

    /// Element by element: each of D is in one tile, which has the row of A and the matrix of B that it is the product of.
    #[test]
    fn every_element_is_in_one_tile() {
        let spec = spec(&[300, 1, 128, 129, 500]);
        spec.check().unwrap();
        for shape in spec.shapes(132) {
            let mut found = vec![[0u8; 640]; spec.rows_d];
            let (units, boxes) = spec.units(&shape, 66).unwrap();
            for tile in units.into_iter().flatten() {
                assert_eq!(tile.blocks, 3);
                let rows = sources(&tile, &boxes).into_iter().zip(results(&tile, &boxes));
                for ((source, row), at) in rows {
                    let of = |rows: &&ProblemRows| (rows.to..rows.to + rows.count).contains(&at);
                    let (problem, rows) = spec
                        .problems
                        .iter()
                        .find_map(|problem| Some((problem, problem.rows.iter().find(of)?)))
                        .unwrap();
                    assert_eq!((tile.first as usize, source), (problem.b_row, rows.source));
                    assert_eq!(row, rows.first + at - rows.to);
                    let columns = tile.column as usize..(tile.column + shape.columns).min(640) as usize;
                    columns.for_each(|column| found[at][column] += 1);
                }
            }
            assert!(found.iter().flatten().all(|times| *times == 1), "{shape:?}");
        }
    }

    /// The rows of D that the kernel stores a tile's in.
    fn results(tile: &GemmTile, boxes: &[GemmBox]) -> Vec<usize> {
        if tile.destination & BOXES_OF_D == 0 {
            return (0..tile.rows).map(|row| (tile.destination_row + row) as usize).collect();
        }
        let mut all = Vec::new();
        for (begin, rows) in
            [(tile.destination_row, tile.rows.min(64)), (tile.group, tile.rows.saturating_sub(64))]
        {
            all.extend(listed(begin, rows as usize, 1, boxes).into_iter().map(|(_, row)| row));
        }
        all
    }

    /// The tensors and rows of A that the kernel loads for a tile.
    fn sources(tile: &GemmTile, boxes: &[GemmBox]) -> Vec<(usize, usize)> {
        if tile.destination & BOXES_OF_A == 0 {
            let source = usize::from(tile.source) % BOX_MAPS;
            return (0..tile.rows).map(|row| (source, (tile.source_row + row) as usize)).collect();
        }
        let second = boxes[tile.source_row as usize].row;
        let mut all = listed(tile.source_row + 1, 64, GROUPED_SOURCES, boxes);
        all.extend(listed(second, 64, GROUPED_SOURCES, boxes));
        all
    }

    /// So many rows of a list.
    fn listed(begin: u32, rows: usize, tensors: usize, boxes: &[GemmBox]) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        for of in &boxes[begin as usize..] {
            if all.len() == rows {
                break;
            }
            let (size, tensor) = (of.map as usize / tensors, of.map as usize % tensors);
            all.extend((of.row..of.row + BOXES[size]).map(|row| (tensor, row as usize)));
        }
        assert_eq!(all.len(), rows);
        all
    }

    #[test]
    fn units_with_most_terms_come_first_and_rounds_turn() {
        let mut spec = spec(&[256, 256, 128]);
        spec.layout = GemmLayout::Tn;
        (spec.m, spec.strides[0], spec.strides[1]) = (256, 256, 640);
        (spec.rows_a, spec.rows_b) = (vec![4096], vec![4096, 64]);
        let mut next = 0;
        for (problem, blocks) in spec.problems.iter_mut().zip([2, 5, 3]) {
            problem.rows =
                vec![ProblemRows { source: 0, first: 0, to: problem.rows[0].to.min(384), count: 256 }];
            problem.terms =
                (0..blocks).map(|block| ProblemTerm { a: (0, 64 * block), b: (0, 64 * block) }).collect();
            next += blocks;
        }
        spec.check().unwrap();
        assert_eq!(spec.terms().len(), 2 * next);
        let shape = GemmShape::whole(256, TilePair::Rows);
        let (units, boxes) = spec.units(&shape, 4).unwrap();
        assert!(boxes.is_empty());
        let of: Vec<_> = units.iter().map(|unit| (unit[0].first, unit[0].blocks)).collect();
        let (long, middle, short) = ((2, 5), (7, 3), (0, 2));
        assert_eq!(of, [long, long, long, middle, short, short, middle, middle, short]);
        let busy: Vec<usize> = (0..9).map(|unit| turn(unit, 4)).collect();
        assert_eq!(busy, [0, 1, 2, 3, 3, 2, 1, 0, 0]);
    }

    #[test]
    fn what_no_kernel_takes_is_told() {
        let wrong = |change: fn(&mut GroupedGemmSpec)| {
            let mut spec = spec(&[100, 60]);
            change(&mut spec);
            spec.check().unwrap_err()
        };
        assert!(wrong(|spec| spec.problems[1].rows[0].to = 110).contains("rows that are not there"));
        assert!(wrong(|spec| spec.problems[1].b_row = 700).contains("rows of B"));
        assert!(wrong(|spec| spec.strides[2] = 644).contains("pad them"));
        assert!(wrong(|spec| spec.problems.clear()).contains("no problems"));
        let takes =
            |k| GroupedGemmSpec::takes(GemmLayout::Nn, [k, 64, 64], k, ElementType::Bf16, Scalar::F32);
        assert!(takes(128) && !takes(136));
    }
}
