//! In which order a GEMM computes its tiles: for the L2 cache, or shard by shard so that communication starts early.

use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;

use super::shape::{GemmShape, TILE_ROWS, TilePair};

/// The order in which a product's tiles are begun. They come in units of two, which a cluster computes together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TileOrder {
    /// Tiles that are computed at the same time form a square, so that they share what they read.
    #[default]
    Grouped,
    /// Rows are cut into `shards` equal parts, which follow each other from number `first` on, round to the one before it; in
    /// this order a rank computes the others' shards first and its own last.
    Shards {
        /// How many; their rows are a multiple of a unit's.
        shards: usize,
        /// The first one.
        first: usize,
    },
    /// As `Shards`, but the last one, `first`'s predecessor, is not left to the end: each block of it follows the block of the others
    /// after the same one. So what is sent of it travels under the others' products. As `Shards` with one block.
    ShardBlocks {
        /// How many shards.
        shards: usize,
        /// The first one.
        first: usize,
        /// Parts of every shard, at least one.
        blocks: usize,
    },
    /// As `Shards` for the first `ahead` columns of units; of the others all rows are computed together, after the first shard of those and
    /// before the rest of them. So what shards share of the second operand is read once, and who waits for other shards' rows has that
    /// much to do.
    ShardAhead {
        /// How many shards.
        shards: usize,
        /// The first one.
        first: usize,
        /// Columns of units whose rows are computed shard by shard, less than all.
        ahead: usize,
    },
    /// Rows of tiles are cut behind so many each, ascending; what lies before a cut is begun before what lies behind it. Units with
    /// rows of both come before it.
    Cuts(Arc<[usize]>),
    /// Columns are cut behind so many each, ascending; what lies before a cut is begun before what lies behind it. Units with columns of both
    /// come before it.
    ColumnCuts(Arc<[usize]>),
    /// Units by their number, row after row of the grid of units; each once.
    Table(Arc<[u32]>),
}

/// The place of a unit's first tile in the grid of tiles, and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmUnit {
    /// Row of its first tile, in tiles.
    pub row_tile: u16,
    /// Column of its first tile, in tiles.
    pub column_tile: u16,
    /// Whose signal announces it.
    pub group: u32,
}

/// Rows and columns of units of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitGrid {
    /// Rows of units.
    pub rows: usize,
    /// Columns of units.
    pub columns: usize,
}

impl UnitGrid {
    /// Of a product of `m` rows and `n` columns.
    pub fn new(shape: &GemmShape, m: usize, n: usize) -> Self {
        let [rows, columns] = shape.unit();
        Self { rows: m.div_ceil(rows), columns: n.div_ceil(columns) }
    }

    /// Units.
    pub fn count(self) -> usize {
        self.rows * self.columns
    }
}

/// Elements of D that are computed at the same time should be about a square: 66 units of 256 x 256 are 8 x 8 of them.
pub const TOGETHER_ROWS: usize = 2048;

/// Why a product has no such order of units, or no such groups of them.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OrderError {
    /// All columns of units come first.
    #[error("{ahead} of {columns} columns of units ahead")]
    Ahead {
        /// Columns of units that come first.
        ahead: usize,
        /// Columns of units.
        columns: usize,
    },
    /// Cuts between rows that do not ascend, or lie outside.
    #[error("cuts behind {cuts:?} of {rows} rows of tiles")]
    Cuts {
        /// Where it is cut.
        cuts: Vec<usize>,
        /// Rows of tiles.
        rows: usize,
    },
    /// Likewise between columns.
    #[error("cuts behind {cuts:?} of {columns} columns")]
    ColumnCuts {
        /// Where it is cut.
        cuts: Vec<usize>,
        /// Columns of D.
        columns: usize,
    },
    /// A table that leaves units out, or names some twice.
    #[error("an order of {named} units that does not name each of {units} once")]
    Table {
        /// Its length.
        named: usize,
        /// Units of the product.
        units: usize,
    },
    /// Shards that are no whole units.
    #[error(
        "{rows} rows in {shards} shards from number {first} on; shards are multiples of {unit_rows} rows"
    )]
    Shards {
        /// Rows of D.
        rows: usize,
        /// Shards.
        shards: usize,
        /// The shard that comes first.
        first: usize,
        /// Rows of a unit.
        unit_rows: usize,
    },
    /// Groups that are not all units.
    #[error("groups of {sizes:?} units, {wanted} in all; the product has {units}")]
    Groups {
        /// Units of each.
        sizes: Vec<u32>,
        /// Of all.
        wanted: usize,
        /// Units of the product.
        units: usize,
    },
}

/// The units of a product in their order.
///
/// # Errors
/// Why there is no such order.
pub fn units(order: &TileOrder, shape: &GemmShape, m: usize, n: usize) -> Result<Vec<GemmUnit>, OrderError> {
    let grid = UnitGrid::new(shape, m, n);
    let unit_rows = shape.unit()[0];
    let numbers: Vec<usize> = match order {
        TileOrder::Grouped => grouped(0..grid.rows, 0..grid.columns, grid, unit_rows).collect(),
        TileOrder::Shards { shards, first } => in_shards(*shards, *first, m, grid, unit_rows)?.concat(),
        TileOrder::ShardBlocks { shards, first, blocks } => {
            in_blocks(&in_shards(*shards, *first, m, grid, unit_rows)?, (*blocks).max(1))
        }
        TileOrder::ShardAhead { shards, first, ahead } => {
            check_shards(*shards, *first, m, unit_rows)?;
            if *ahead >= grid.columns {
                return Err(OrderError::Ahead { ahead: *ahead, columns: grid.columns });
            }
            let rows = grid.rows / shards;
            let of = |index: usize| {
                let from = (first + index) % shards * rows;
                grouped(from..from + rows, 0..*ahead, grid, unit_rows)
            };
            let together = grouped(0..grid.rows, *ahead..grid.columns, grid, unit_rows);
            of(0).chain(together).chain((1..*shards).flat_map(of)).collect()
        }
        TileOrder::Cuts(cuts) => {
            let ends = cuts.iter().map(|tiles| (tiles * TILE_ROWS).div_ceil(unit_rows));
            let wrong = || OrderError::Cuts { cuts: cuts.to_vec(), rows: m.div_ceil(TILE_ROWS) };
            let rows = between(ends, grid.rows).ok_or_else(wrong)?;
            rows.into_iter().flat_map(|rows| grouped(rows, 0..grid.columns, grid, unit_rows)).collect()
        }
        TileOrder::ColumnCuts(cuts) => {
            let ends = cuts.iter().map(|columns| columns.div_ceil(shape.unit()[1]));
            let wrong = || OrderError::ColumnCuts { cuts: cuts.to_vec(), columns: n };
            let columns = between(ends, grid.columns).ok_or_else(wrong)?;
            columns.into_iter().flat_map(|columns| grouped(0..grid.rows, columns, grid, unit_rows)).collect()
        }
        TileOrder::Table(table) => {
            let mut seen = vec![false; grid.count()];
            let all = table.iter().map(|&number| number as usize);
            let each_once = all
                .clone()
                .all(|number| seen.get_mut(number).is_some_and(|seen| !std::mem::replace(seen, true)));
            if !each_once || table.len() != grid.count() {
                return Err(OrderError::Table { named: table.len(), units: grid.count() });
            }
            all.collect()
        }
    };
    let [row_tiles, column_tiles] = match shape.pair {
        TilePair::Rows => [2, 1],
        TilePair::Columns => [1, 2],
    };
    // A product's tiles are numbered by 16 bits: its sizes were checked.
    let unit = |number: usize| GemmUnit {
        row_tile: (number / grid.columns * row_tiles) as u16,
        column_tile: (number % grid.columns * column_tiles) as u16,
        group: 0,
    };
    Ok(numbers.into_iter().map(unit).collect())
}

/// The ranges up to each of these ends, and up to the last; `None` where one ends before it begins.
fn between(ends: impl Iterator<Item = usize>, last: usize) -> Option<Vec<Range<usize>>> {
    let mut from = 0;
    let range = |to: usize| {
        let range = from..to;
        from = to;
        (range.start <= to && to <= last).then_some(range)
    };
    ends.chain([last]).map(range).collect()
}

fn check_shards(shards: usize, first: usize, m: usize, unit_rows: usize) -> Result<(), OrderError> {
    if shards == 0 || first >= shards || !m.is_multiple_of(shards * unit_rows) {
        return Err(OrderError::Shards { rows: m, shards, first, unit_rows });
    }
    Ok(())
}

/// The units of every shard, from number `first` on.
fn in_shards(
    shards: usize,
    first: usize,
    m: usize,
    grid: UnitGrid,
    unit_rows: usize,
) -> Result<Vec<Vec<usize>>, OrderError> {
    check_shards(shards, first, m, unit_rows)?;
    let rows = grid.rows / shards;
    let of =
        |shard: usize| grouped(shard * rows..(shard + 1) * rows, 0..grid.columns, grid, unit_rows).collect();
    Ok((0..shards).map(|index| of((first + index) % shards)).collect())
}

/// Block after block of all shards but the last, whose own blocks come one later. Blocks are not mixed: units that are computed at
/// the same time share what they read.
fn in_blocks(shards: &[Vec<usize>], blocks: usize) -> Vec<usize> {
    let Some((own, others)) = shards.split_last() else { return Vec::new() };
    let block = |units: &[usize], at: usize| {
        units[units.len() * at / blocks..units.len() * (at + 1) / blocks].to_vec()
    };
    let mut order = Vec::new();
    for number in 0..blocks {
        order.extend(others.iter().flat_map(|shard| block(shard, number)));
        order.extend(number.checked_sub(1).map(|before| block(own, before)).unwrap_or_default());
    }
    order.extend(block(own, blocks - 1));
    order
}

/// Column after column of a group of rows, then the next group.
fn grouped(
    rows: Range<usize>,
    columns: Range<usize>,
    grid: UnitGrid,
    unit_rows: usize,
) -> impl Iterator<Item = usize> {
    let height = (TOGETHER_ROWS / unit_rows).max(1);
    // Groups of even height, so that the last is no narrow strip.
    let groups = rows.len().div_ceil(height).max(1);
    (0..groups).flat_map(move |group| {
        let from = rows.start + rows.len() * group / groups;
        let to = rows.start + rows.len() * (group + 1) / groups;
        columns.clone().flat_map(move |column| (from..to).map(move |row| row * grid.columns + column))
    })
}

/// Gives units their groups, `sizes` units each in their order, and says how often each group's counter hears of a tile that has
/// elements ([`GemmShape::raises`]).
///
/// # Errors
/// When the groups are not of all units.
pub fn group(
    units: &mut [GemmUnit],
    sizes: &[u32],
    shape: &GemmShape,
    m: usize,
    n: usize,
) -> Result<Vec<u32>, OrderError> {
    let wanted: usize = sizes.iter().map(|&size| size as usize).sum();
    if wanted != units.len() || sizes.contains(&0) {
        return Err(OrderError::Groups { sizes: sizes.to_vec(), wanted, units: units.len() });
    }
    let mut rest = units;
    let mut signals = Vec::with_capacity(sizes.len());
    for (number, &size) in sizes.iter().enumerate() {
        let (group, after) = std::mem::take(&mut rest).split_at_mut(size as usize);
        rest = after;
        let mut tiles = 0;
        for unit in group {
            unit.group = number as u32;
            let (row, column) = (usize::from(unit.row_tile), usize::from(unit.column_tile));
            let second = match shape.pair {
                TilePair::Rows => (row + 1) * TILE_ROWS < m,
                TilePair::Columns => (column + 1) * (shape.columns as usize) < n,
            };
            tiles += 1 + u32::from(second);
        }
        signals.push(shape.raises() * tiles);
    }
    Ok(signals)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(pair: TilePair) -> GemmShape {
        GemmShape::whole(256, pair)
    }

    /// Numbers of the grid's units as an order gives them.
    fn numbers(order: &TileOrder, m: usize, n: usize) -> Vec<usize> {
        let columns = UnitGrid::new(&shape(TilePair::Rows), m, n).columns;
        let units = units(order, &shape(TilePair::Rows), m, n).unwrap();
        units
            .iter()
            .map(|unit| usize::from(unit.row_tile) / 2 * columns + usize::from(unit.column_tile))
            .collect()
    }

    #[test]
    fn every_order_has_every_unit_once() {
        let table = TileOrder::Table((0..120).rev().collect());
        let blocks = TileOrder::ShardBlocks { shards: 4, first: 1, blocks: 3 };
        let cuts = TileOrder::Cuts([3, 3, 10].into());
        let ahead = TileOrder::ShardAhead { shards: 4, first: 2, ahead: 7 };
        let columns = TileOrder::ColumnCuts([256, 256, 1000].into());
        let shards = TileOrder::Shards { shards: 4, first: 3 };
        for order in [TileOrder::Grouped, shards, blocks, ahead, cuts, columns, table] {
            let mut numbers = numbers(&order, 3072, 2500);
            numbers.sort_unstable();
            assert_eq!(numbers, (0..120).collect::<Vec<_>>(), "{order:?}");
        }
        let wrong = TileOrder::Table([0, 0, 1, 2].into());
        assert!(units(&wrong, &shape(TilePair::Rows), 512, 512).is_err());
        assert!(units(&TileOrder::Shards { shards: 3, first: 0 }, &shape(TilePair::Rows), 512, 512).is_err());
    }

    #[test]
    fn groups_are_even_and_shards_begin_where_they_should() {
        // 12 rows of units: two groups of 6, column by column.
        assert_eq!(numbers(&TileOrder::Grouped, 3072, 512)[..8], [0, 2, 4, 6, 8, 10, 1, 3]);
        let rows: Vec<_> = numbers(&TileOrder::Shards { shards: 4, first: 3 }, 1024, 256);
        assert_eq!(rows, [3, 0, 1, 2]);
        // Of two columns one is ahead: the last row of it, the other column, the rest of it.
        let ahead = TileOrder::ShardAhead { shards: 4, first: 3, ahead: 1 };
        assert_eq!(numbers(&ahead, 1024, 512), [6, 1, 3, 5, 7, 0, 2, 4]);
        let all = TileOrder::ShardAhead { shards: 4, first: 3, ahead: 2 };
        assert!(units(&all, &shape(TilePair::Rows), 1024, 512).is_err());
        // Three rows of tiles: the second unit has the last of them and one that lies behind the cut.
        let cut = numbers(&TileOrder::Cuts([3].into()), 1024, 512);
        assert_eq!(cut, [0, 2, 1, 3, 4, 6, 5, 7]);
        assert!(units(&TileOrder::Cuts([9].into()), &shape(TilePair::Rows), 1024, 512).is_err());
        // Of four columns of tiles the second has columns of both.
        let columns = numbers(&TileOrder::ColumnCuts([300].into()), 512, 1024);
        assert_eq!(columns, [0, 4, 1, 5, 2, 6, 3, 7]);
        let of_many_rows = numbers(&TileOrder::ColumnCuts([512].into()), 3072, 1024);
        assert_eq!(of_many_rows[..24].iter().filter(|number| *number % 4 < 2).count(), 24);
        for wrong in [vec![1300], vec![512, 256]] {
            assert!(units(&TileOrder::ColumnCuts(wrong.into()), &shape(TilePair::Rows), 512, 1024).is_err());
        }
    }

    /// Whoever waits for a unit of its own shard has sent, as every other rank has, all that comes before it in any order.
    #[test]
    fn own_blocks_follow_the_same_blocks_of_the_others() {
        let shards: Vec<Vec<usize>> = (0..3).map(|shard| (10 * shard..10 * shard + 4).collect()).collect();
        assert_eq!(in_blocks(&shards, 2), [0, 1, 10, 11, 2, 3, 12, 13, 20, 21, 22, 23]);
        assert_eq!(in_blocks(&shards, 1), shards.concat());
        let one_rank: Vec<Vec<usize>> = vec![(0..5).collect()];
        assert_eq!(in_blocks(&one_rank, 2), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn counters_hear_twice_of_each_tile_that_has_elements() {
        // Three rows of tiles, so that the second unit's second tile is empty.
        let shape = shape(TilePair::Rows);
        let mut all = units(&TileOrder::Grouped, &shape, 300, 256).unwrap();
        assert_eq!(group(&mut all, &[1, 1], &shape, 300, 256).unwrap(), [4, 2]);
        assert_eq!(all[1], GemmUnit { row_tile: 2, column_tile: 0, group: 1 });
        assert!(group(&mut all, &[3], &shape, 300, 256).unwrap_err().to_string().contains("has 2"));
        assert!(group(&mut all, &[2, 0], &shape, 300, 256).is_err());
    }
}
