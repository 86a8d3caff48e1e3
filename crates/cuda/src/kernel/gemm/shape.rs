use super::GemmSpec;
use super::order::UnitGrid;

/// Rows of a tile (`kGemmTileM`).
pub(super) const TILE_ROWS: usize = 128;
/// Terms of a block (`kGemmBlockK`).
const BLOCK: usize = 64;

/// Columns of the tiles that there are kernels for.
pub(super) const COLUMNS: [u32; 4] = [64, 128, 192, 256];

/// Where the second tile of a unit lies, and so which operand its CTAs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TilePair {
    /// Below the first: B is shared.
    Rows,
    /// Beside it: A is shared.
    Columns,
}

/// How a product is cut up: tiles of 128 rows, two to a unit, and each unit's k into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Columns of a tile.
    pub columns: u32,
    /// Where the second tile of a unit lies.
    pub pair: TilePair,
    /// Parts of k that are computed by themselves and summed in their order.
    pub splits: u32,
}

impl GemmShape {
    pub(super) const THREADS: u32 = 384;
    /// By how many blocks of k the first warpgroup goes before the second.
    pub(super) const LEAD: u32 = 2;

    /// Blocks of k on their way at once: as many as shared memory holds.
    pub(super) const fn stages(columns: u32) -> u32 {
        match columns {
            256 | 192 => 4,
            128 => 6,
            _ => 8,
        }
    }

    /// Dynamic shared memory of a CTA: `GemmShared`, and what aligning it to 1024 bytes may take.
    pub(super) const fn shared_bytes(columns: u32) -> u32 {
        let stage = (TILE_ROWS as u32 + columns) * 128;
        // Records and barriers are far smaller than the rounding up of the whole.
        Self::stages(columns) * stage + (32 << 10) + 1024 + 1024
    }

    /// Rows and columns of a unit.
    pub const fn unit(&self) -> [usize; 2] {
        match self.pair {
            TilePair::Rows => [2 * TILE_ROWS, self.columns as usize],
            TilePair::Columns => [TILE_ROWS, 2 * self.columns as usize],
        }
    }

    /// Floats that the parts of a product need beside it.
    pub(super) fn partials(&self, m: usize, n: usize) -> usize {
        match self.splits {
            0 | 1 => 0,
            splits => {
                UnitGrid::new(self, m, n).count() * 2 * splits as usize * TILE_ROWS * self.columns as usize
            }
        }
    }

    /// An estimate of the time that a product takes on `workers` multiprocessors, in their cycles. The constants are fitted to
    /// an H200's times for the shapes of the benchmark.
    fn cost(self, spec: &GemmSpec, workers: u32) -> f64 {
        /// Bytes that a multiprocessor takes from the second level cache in a cycle when all do, and from memory.
        const CACHE: f64 = 36.0;
        const MEMORY: f64 = 2500.0 / 132.0;
        /// What a tile costs beside its blocks, and a column of it.
        const TILE: f64 = 1500.0;
        const COLUMN: f64 = 4.0;
        let columns = f64::from(self.columns);
        let (a, b) = match self.pair {
            TilePair::Rows => (16384.0, 64.0 * columns),
            TilePair::Columns => (8192.0, 128.0 * columns),
        };
        // 64 columns of one block keep the matrix unit busy for 256 cycles.
        let block = f64::max(4.0 * columns, (a + b) / CACHE);
        let splits = f64::from(self.splits);
        let blocks = (spec.k.div_ceil(BLOCK) as f64 / splits).ceil();
        // Parts are written by all, and read by who comes last.
        let merge = if self.splits > 1 { 512.0 * columns * (1.0 + splits) / CACHE } else { 0.0 };
        let items = UnitGrid::new(&self, spec.m, spec.n).count() as f64 * splits;
        let rounds = (items / f64::from((workers / 2).max(1))).ceil();
        let computing = rounds * (blocks * block + TILE + COLUMN * columns + merge);
        let operands = (spec.m + spec.n) as f64 * spec.k as f64 * spec.element.bytes() as f64;
        let memory = operands / (MEMORY * f64::from(workers.max(1)));
        computing.max(memory)
    }
}

/// The shapes that a product can have, least estimate first. `sm_margin` does not count: bits must not depend on it.
pub(super) fn shapes(spec: &GemmSpec, sm_count: u32) -> Vec<GemmShape> {
    /// More parts cost more than they bring.
    const MOST_SPLITS: u32 = 8;
    /// Blocks that a part has at least.
    const LEAST_BLOCKS: usize = 8;
    let mut all = Vec::new();
    for columns in COLUMNS {
        for pair in [TilePair::Rows, TilePair::Columns] {
            let whole = GemmShape { columns, pair, splits: 1 };
            // Where there is enough for all multiprocessors, parts bring nothing.
            let few = UnitGrid::new(&whole, spec.m, spec.n).count() as u32 * 2 < 2 * sm_count;
            let parts = if few { MOST_SPLITS.min((spec.k.div_ceil(BLOCK) / LEAST_BLOCKS) as u32) } else { 1 };
            all.extend((1..=parts.max(1)).map(|splits| GemmShape { splits, ..whole }));
        }
    }
    all.sort_by(|a, b| a.cost(spec, sm_count).total_cmp(&b.cost(spec, sm_count)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{ElementType, GemmLayout};

    fn best(m: usize, n: usize, k: usize) -> GemmShape {
        shapes(&GemmSpec::new(m, n, k, GemmLayout::Nt, ElementType::Bf16), 132)[0]
    }

    #[test]
    fn shapes_fit_a_multiprocessor() {
        for columns in COLUMNS {
            assert!(GemmShape::shared_bytes(columns) <= 232_448, "{columns}");
        }
    }

    #[test]
    fn large_products_take_large_tiles_and_few_rows_many() {
        assert_eq!(best(8192, 8192, 8192), GemmShape { columns: 256, pair: TilePair::Rows, splits: 1 });
        // One row of tiles: nothing lies below.
        let few = best(128, 8192, 8192);
        assert_eq!(few.pair, TilePair::Columns);
        let units = UnitGrid::new(&few, 128, 8192).count() as u32 * few.splits;
        assert!((50..=66).contains(&units), "{few:?}");
    }
}
