//! The tiles of the problems of a grouped GEMM, in their order, and in which shape they are computed fastest.

use bytemuck::NoUninit;
use counterpoint_tiles::gemm::{
    self as tiles, GemmLayout, GemmShape, GemmUnit, TILE_ROWS, TileOrder, TilePair, Warpgroups,
};

use super::problems::{GemmProblem, GroupedGemmSpec, ProblemRows};
use super::rows::{GemmTile, RowTile};
use super::shape::TilingCost;
use super::source::TILES_OF_PROBLEMS;
use super::{GemmFault, GemmGrid, GemmSpec};

/// `GemmBox` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit)]
#[repr(C)]
pub(super) struct GemmBox {
    /// Of D.
    pub(super) row: u32,
    /// Which of [`BOXES`].
    pub(super) map: u32,
}

/// That a tile is stored by listed boxes (`kBoxesOfD`).
const BOXES_OF_D: u16 = 1;

/// Rows that are stored at once, box by box.
pub(super) const BOXES: [u32; 7] = [64, 32, 16, 8, 4, 2, 1];

/// A row of tiles, and its group: where its second 64 rows' boxes begin.
type ListedTile = (RowTile, u32);

/// A row of a problem: its tensor and row of A, and its row of D.
type ProblemRow = ((usize, u32), u32);

/// A unit: the tiles of both CTAs of a cluster.
pub(super) type ProblemUnit = [GemmTile; 2];

impl GroupedGemmSpec {
    /// The tiles of a problem's rows, and one more for a unit that needs a second. Tiles whose rows do not lie together have their boxes in
    /// a list.
    fn row_tiles(problem: &GemmProblem, boxes: &mut Vec<GemmBox>) -> Vec<ListedTile> {
        let mut tiles = Vec::new();
        if let &[ProblemRows { source, first, to, count }] = &problem.rows[..] {
            let tile = |row: usize| RowTile {
                source_row: (first + row) as u32,
                destination_row: (to + row) as u32,
                source: source as u16,
                destination: 0,
                rows: TILE_ROWS.min(count - row) as u32,
            };
            tiles.extend((0..count).step_by(TILE_ROWS).map(|row| (tile(row), 0)));
        } else {
            Self::tiles_of_ranges(problem, &mut tiles, boxes);
        }
        let empty = tiles.last().map(|&(last, group)| (RowTile { rows: 0, ..last }, group));
        tiles.extend(empty);
        tiles
    }

    /// The same of rows in several ranges.
    fn tiles_of_ranges(problem: &GemmProblem, tiles: &mut Vec<ListedTile>, boxes: &mut Vec<GemmBox>) {
        // A product's rows are fewer than 2^22.
        let of = |rows: &ProblemRows| {
            let ProblemRows { source, first, to, count } = *rows;
            (0..count as u32).map(move |row| ((source, first as u32 + row), to as u32 + row))
        };
        let rows: Vec<ProblemRow> = problem.rows.iter().flat_map(of).collect();
        for rows in rows.chunks(TILE_ROWS) {
            let ((source, first), to) = rows[0];
            let mut tile = RowTile {
                source_row: first,
                destination_row: to,
                source: source as u16,
                destination: 0,
                rows: rows.len() as u32,
            };
            let mut group = 0;
            let half_tiles = || rows.chunks(TILE_ROWS / 2);
            if !rows.windows(2).all(|pair| pair[0].1 + 1 == pair[1].1) {
                let mut list = |rows: &[ProblemRow]| list_boxes(rows, boxes);
                tile.destination |= BOXES_OF_D;
                tile.destination_row = half_tiles().next().map_or(0, &mut list);
                group = half_tiles().nth(1).map_or(0, list);
            }
            tiles.push((tile, group));
        }
    }

    /// The problems in the order in which they are begun: those with the largest K first, so that the last units are short ones.
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
    ) -> Result<(Vec<ProblemUnit>, Vec<GemmBox>), GemmFault> {
        let mut first_sources = Vec::with_capacity(self.problems.len());
        let mut k_sources = 0;
        for problem in &self.problems {
            first_sources.push(k_sources);
            k_sources += problem.k_blocks.len();
        }
        let rows = self.problems.iter().map(|problem| self.rows_of(problem)).sum::<usize>();
        let least = rows / shape.unit()[0] * self.n.div_ceil(shape.unit()[1]);
        let (mut units, mut boxes) = (Vec::with_capacity(least + least / 4), Vec::new());
        // Experts have about as many rows, so most have the units of one before them.
        let mut of_rows: Vec<(usize, Vec<GemmUnit>)> = Vec::new();
        for index in self.in_order() {
            let problem = &self.problems[index];
            let tiles = Self::row_tiles(problem, &mut boxes);
            let first =
                if self.layout == GemmLayout::Tn { first_sources[index] } else { problem.b_row } as u32;
            let blocks = self.blocks_of(problem) as u32;
            let rows = (tiles.len() - 1) * TILE_ROWS;
            let rows_of: Vec<RowTile> = tiles.iter().map(|(tile, _)| *tile).collect();
            let known = of_rows.iter().position(|(of, _)| *of == rows);
            let known = match known {
                Some(known) => known,
                None => {
                    of_rows.push((rows, tiles::units(&TileOrder::Grouped, shape, rows, self.n)?));
                    of_rows.len() - 1
                }
            };
            for unit in &of_rows[known].1 {
                let [mut one, mut other] = GemmTile::of_unit(unit, shape, &rows_of);
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
        let order = self.in_order();
        let mut all: Vec<(f64, GemmShape)> =
            all.map(|shape| (self.cost(shape, workers, &order), shape)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all.into_iter().map(|(_, shape)| shape).collect()
    }

    /// An estimate of the time in cycles of a multiprocessor, as that of one product ([`TilingCost::cost`]).
    fn cost(&self, shape: GemmShape, workers: u32, order: &[usize]) -> f64 {
        /// Bytes from memory in a cycle, of all 132 multiprocessors.
        const MEMORY: f64 = 1400.0;
        /// Of the time of a block, what one warpgroup's rows take. Not measured.
        const HALF: f64 = 0.6;
        let [unit_rows, unit_columns] = shape.unit();
        let columns = self.n.div_ceil(unit_columns);
        let like = GemmSpec::new(2 * TILE_ROWS, self.n, self.k.max(1), self.layout, self.element);
        // Pairs side by side take no longer here: of 18 sizes on an H200 they were the fastest in 13, and with what they take of one product
        // chosen in 4 (docs/experiments/033-scattered-rows.md).
        let one_above = GemmShape { pair: TilePair::Rows, ..shape };
        let (block, (each, last)) = (one_above.block_cycles(&like), shape.end_cycles(self.output));
        // A CTA for each unit has no next one to multiply while it stores.
        let each = if self.grid == GemmGrid::PerUnit { each + last } else { each };
        let clusters = shape.clusters(workers).max(1) as usize;
        // What all have been given in whole pairs of rounds, there and back, and what each has besides; who comes next.
        let (mut all, mut busy, mut elements) = (0.0f64, vec![0.0f64; clusters], 0.0);
        let mut next = 0;
        let together = unit_rows / TILE_ROWS;
        for &index in order {
            let problem = &self.problems[index];
            let rows = self.rows_of(problem);
            let tiles = rows.div_ceil(TILE_ROWS);
            // Of a tile of few rows one warpgroup has none; where tiles lie one above the other the other one has more.
            let is_half = (1..=TILE_ROWS / 2).contains(&(rows % TILE_ROWS));
            let alone = shape.pair == TilePair::Columns && shape.warpgroups == Warpgroups::Cooperative;
            let half_units = usize::from(is_half && alone);
            let blocks = self.blocks_of(problem) as f64 * block;
            let units = tiles.div_ceil(together) * columns;
            let whole = units - half_units * columns;
            for (count, part) in [(whole, 1.0), (units - whole, HALF)] {
                let seconds = part * blocks + each;
                all += (count / (2 * clusters) * 2) as f64 * seconds;
                let mut left = count % (2 * clusters);
                while left > 0 {
                    // There, or back.
                    let (begin, end) = if next < clusters { (next, clusters) } else { (next, 2 * clusters) };
                    let run = left.min(end - begin);
                    let taken = match next < clusters {
                        true => begin..begin + run,
                        false => 2 * clusters - begin - run..2 * clusters - begin,
                    };
                    busy[taken].iter_mut().for_each(|of| *of += seconds);
                    (left, next) = (left - run, (next + run) % (2 * clusters));
                }
            }
            elements += (self.rows_of(problem) + self.n) as f64 * self.k_of(problem) as f64;
        }
        let computing = all + busy.into_iter().fold(0.0, f64::max) + last;
        let loading = elements * self.element.bytes() as f64 / (MEMORY * f64::from(workers) / 132.0);
        (computing.powi(3) + loading.powi(3)).cbrt()
    }
}

/// Adds the boxes of the rows of D: the largest first of those that lie together. Where they begin.
fn list_boxes(rows: &[ProblemRow], boxes: &mut Vec<GemmBox>) -> u32 {
    let begin = boxes.len() as u32;
    for together in rows.chunk_by(|a, b| a.1 + 1 == b.1) {
        let mut row = together[0].1;
        for (map, rows) in (0..).zip(BOXES) {
            if together.len() as u32 & rows != 0 {
                boxes.push(GemmBox { row, map });
                row += rows;
            }
        }
    }
    begin
}

/// Units, which clusters take in turn, for those that are to compute them: every other round goes backwards, so that who had the longest has
/// the shortest next.
fn deal<T>(units: &mut [T], clusters: usize) {
    units.chunks_exact_mut(clusters).skip(1).step_by(2).for_each(<[T]>::reverse);
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::super::problems::ProblemKBlock;
    use super::super::problems::tests::spec;

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
                for (row, at) in (tile.source_row as usize..).zip(results(&tile, &boxes)) {
                    let of = |rows: &&ProblemRows| (rows.to..rows.to + rows.count).contains(&at);
                    let (problem, rows) = spec
                        .problems
                        .iter()
                        .find_map(|problem| Some((problem, problem.rows.iter().find(of)?)))
                        .unwrap();
                    assert_eq!((tile.first as usize, usize::from(tile.source)), (problem.b_row, rows.source));
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
            all.extend(listed(begin, rows as usize, boxes));
        }
        all
    }

    /// So many rows of a list.
    fn listed(begin: u32, rows: usize, boxes: &[GemmBox]) -> Vec<usize> {
        let mut all = Vec::new();
        for of in &boxes[begin as usize..] {
            if all.len() == rows {
                break;
            }
            all.extend((of.row..of.row + BOXES[of.map as usize]).map(|row| row as usize));
        }
        assert_eq!(all.len(), rows);
        all
    }

    /// Of tiles in turn each would be stored while nothing is multiplied.
    #[test]
    fn products_under_other_kernels_share_their_tiles() {
        let mut spec = spec(&[1024; 16]);
        (spec.n, spec.k) = (2048, 1024);
        assert_eq!(spec.shapes(132)[0].warpgroups, Warpgroups::Pingpong);
        spec.grid = GemmGrid::PerUnit;
        assert_eq!(spec.shapes(132)[0].warpgroups, Warpgroups::Cooperative);
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
            problem.k_blocks =
                (0..blocks).map(|block| ProblemKBlock { a: (0, 64 * block), b: (0, 64 * block) }).collect();
            next += blocks;
        }
        spec.check().unwrap();
        assert_eq!(spec.k_sources().len(), 2 * next);
        let shape = GemmShape::whole(256, TilePair::Rows);
        let (units, boxes) = spec.units(&shape, 4).unwrap();
        assert!(boxes.is_empty());
        let of: Vec<_> = units.iter().map(|unit| (unit[0].first, unit[0].blocks)).collect();
        let (long, middle, short) = ((2, 5), (7, 3), (0, 2));
        assert_eq!(of, [long, long, long, middle, short, short, middle, middle, short]);
    }
}
