use super::GemmSpec;
use super::order::UnitGrid;

/// Rows of a tile (`kGemmTileM`).
pub(super) const TILE_ROWS: usize = 128;
/// Terms of a block (`kGemmBlockK`).
pub(super) const BLOCK: usize = 64;

/// Columns of the tiles that there are kernels for.
pub(super) const COLUMNS: [u32; 5] = [64, 128, 160, 192, 256];

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

/// What a tile costs beside its blocks, in cycles.
const TILE_CYCLES: f64 = 3000.0;

impl GemmShape {
    pub(super) const THREADS: u32 = 384;

    /// Blocks of k on their way at once: as many as shared memory holds.
    pub(super) const fn stages(columns: u32) -> u32 {
        match columns {
            256 | 192 | 160 => 4,
            128 => 6,
            _ => 8,
        }
    }

    /// Dynamic shared memory of a CTA: `GemmShared`, and what aligning it to 1024 bytes may take.
    pub(super) const fn shared_bytes(columns: u32) -> u32 {
        // Where B lies along n, whole chunks of 64 columns are loaded.
        let stage = (TILE_ROWS as u32 + columns.next_multiple_of(64)) * 128;
        // Records and barriers are far smaller than the rounding up of the whole.
        Self::stages(columns) * stage + (32 << 10) + 1024 + 1024
    }

    /// Columns of elements that are stored at once (`kChunkColumns`).
    pub(super) const fn chunk_columns(&self) -> u32 {
        if self.columns.is_multiple_of(64) { 64 } else { 32 }
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

    /// Cycles of a multiprocessor for one block of a tile while all of them compute, as measured on an H200; 4 a column is what
    /// the matrix unit takes. Narrow tiles wait for operands. Those of 160 columns are interpolated.
    const fn block_cycles(self) -> f64 {
        match (self.columns, self.pair) {
            (64, TilePair::Rows) => 500.0,
            (64, TilePair::Columns) => 420.0,
            (128, TilePair::Rows) => 610.0,
            (128, TilePair::Columns) => 640.0,
            (160, TilePair::Rows) => 730.0,
            (160, TilePair::Columns) => 750.0,
            (192, TilePair::Rows) => 900.0,
            (192, TilePair::Columns) => 930.0,
            (_, TilePair::Rows) => 1060.0,
            (_, TilePair::Columns) => 1085.0,
        }
    }

    /// Cycles of a multiprocessor for a tile of `k` terms.
    pub(super) fn unit_cycles(self, k: usize) -> f64 {
        (k.div_ceil(BLOCK) as f64 / f64::from(self.splits)).ceil() * self.block_cycles() + TILE_CYCLES
    }

    /// An estimate of the time that a product takes on `workers` multiprocessors, in their cycles. The constants are fitted to
    /// an H200's times for the shapes of the benchmark.
    pub(super) fn cost(self, spec: &GemmSpec, workers: u32) -> f64 {
        /// Bytes from memory in a cycle, of all 132 multiprocessors.
        const MEMORY: f64 = 2400.0;
        /// What putting parts together costs, and for each byte of each part and of the sum.
        const MERGE: f64 = 8000.0;
        const MERGED_BYTE: f64 = 0.04;
        let splits = f64::from(self.splits);
        let merge = match self.splits {
            1 => 0.0,
            _ => MERGE + MERGED_BYTE * 512.0 * f64::from(self.columns) * (1.0 + splits),
        };
        let items = UnitGrid::new(&self, spec.m, spec.n).count() as f64 * splits;
        let rounds = (items / f64::from((workers / 2).max(1))).ceil();
        let computing = rounds * (self.unit_cycles(spec.k) + merge);
        let operands = (spec.m + spec.n) as f64 * spec.k as f64 * spec.element.bytes() as f64;
        let loading = operands / MEMORY * 132.0 / f64::from(workers.max(1));
        // The two hinder each other where they are about the same.
        (computing.powi(3) + loading.powi(3)).cbrt()
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
        // 40 units of 256 columns would leave a third of the multiprocessors idle in the last of three rounds.
        assert_eq!(best(1024, 10240, 8192).columns, 160);
    }
}
