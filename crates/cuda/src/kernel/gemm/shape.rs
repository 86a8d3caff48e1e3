use std::collections::BTreeSet;

use super::order::UnitGrid;
use super::{GemmGrid, GemmLayout, GemmSpec};

/// Rows of a tile (`kGemmTileM`).
pub(super) const TILE_ROWS: usize = 128;
/// Terms of a block (`kGemmBlockK`).
pub(super) const BLOCK: usize = 64;

/// Columns of the tiles that there are kernels for.
pub(super) const COLUMNS: [u32; 6] = [64, 128, 160, 192, 224, 256];

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
    /// Parts of k, which the CTAs of a cluster compute at the same time and sum in their order.
    pub splits: u32,
    /// Or 2 parts of k, which the same CTAs compute one after the other: 1 where there are several of the above.
    pub turns: u32,
    /// Or 2 parts of k, the first of which one pair of CTAs hands over to another through memory: 1 where there are several of the above.
    pub hands: u32,
}

/// What a tile costs beside its blocks, in cycles.
const TILE_CYCLES: f64 = 3000.0;

impl GemmShape {
    pub(super) const THREADS: u32 = 384;

    /// Blocks of k on their way at once: as many as shared memory holds.
    pub(super) const fn stages(columns: u32) -> u32 {
        match columns {
            256 | 224 | 192 | 160 => 4,
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

    /// Whether there are kernels that hand parts of k over: wider tiles have no registers for it, and are for more rows.
    pub(super) const fn hands_over(columns: u32, layout: GemmLayout) -> bool {
        columns <= 192 && !matches!(layout, GemmLayout::Tn)
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

    /// Pieces of a tile that parts sum, in turn (`GemmParts::kPieces`).
    const fn pieces(&self) -> u32 {
        2 * self.columns / self.chunk_columns()
    }

    /// Warpgroups that store some of a tile, and tell of it: number `piece % 2` of part `piece % splits`.
    pub(super) fn tellers(&self) -> u32 {
        let all = (0..self.pieces()).map(|piece| [piece % 2, piece % self.splits.max(1)]);
        all.collect::<BTreeSet<_>>().len() as u32
    }

    /// Clusters that run at once on so many multiprocessors. These come in groups of up to 18, and a cluster lies in one of them: the
    /// numbers are those of an H200 with 132.
    const fn clusters(&self, workers: u32) -> u32 {
        match self.splits {
            0 | 1 => workers / 2,
            2 => workers * 30 / 132,
            3 => workers * 17 / 132,
            _ => workers * 15 / 132,
        }
    }

    /// Cycles of a multiprocessor for one block of a tile while all of them compute, as measured on an H200; 4 a column is what
    /// the matrix unit takes. Narrow tiles wait for operands.
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
            (224, TilePair::Rows) => 990.0,
            (224, TilePair::Columns) => 1015.0,
            (_, TilePair::Rows) => 1060.0,
            (_, TilePair::Columns) => 1085.0,
        }
    }

    /// Parts of k whose sums are added: what the bits of a result depend on.
    pub const fn parts(&self) -> u32 {
        self.splits * self.turns * self.hands
    }

    /// Cycles of a multiprocessor for its part of a tile of `k` terms.
    pub(super) fn unit_cycles(self, k: usize) -> f64 {
        /// Until parts know of each other, and bytes of theirs that a multiprocessor sends in a cycle.
        const MEET: f64 = 3000.0;
        const SENT: f64 = 14.0;
        /// Bytes of a part that is kept, there and back.
        const KEPT: f64 = 32.0;
        /// Until the pair that takes them over hears of sums in memory.
        const HEAR: f64 = 5000.0;
        let splits = f64::from(self.splits);
        let bytes = f64::from(TILE_ROWS as u32 * self.columns) * size_of::<f32>() as f64;
        let exchange = match (self.splits, self.turns, self.hands) {
            (0 | 1, 0 | 1, 0 | 1) => 0.0,
            (0 | 1, 0 | 1, _) => HEAR + 2.0 * bytes / KEPT,
            (0 | 1, _, _) => 2.0 * bytes / KEPT,
            _ => MEET + bytes * (splits - 1.0) / splits / SENT,
        };
        let at_once = f64::from(self.splits * self.hands);
        k.div_ceil(BLOCK) as f64 / at_once * self.block_cycles() + TILE_CYCLES + exchange
    }

    /// An estimate of the time that a product takes on `workers` multiprocessors, in their cycles. The constants are fitted to
    /// an H200's times for the shapes of the benchmark.
    pub(super) fn cost(self, spec: &GemmSpec, workers: u32) -> f64 {
        /// Bytes from memory in a cycle, of all 132 multiprocessors.
        const MEMORY: f64 = 2400.0;
        /// From a load of B's to its bytes while all multiprocessors load.
        const LATENCY: f64 = 3900.0;
        let items = UnitGrid::new(&self, spec.m, spec.n).count() as f64 * f64::from(self.hands);
        let clusters = f64::from(self.clusters(workers).max(1));
        let computing = (items / clusters).ceil() * self.unit_cycles(spec.k);
        let operands = (spec.m + spec.n) as f64 * spec.k as f64 * spec.element.bytes() as f64;
        let mut rate = MEMORY * f64::from(workers.max(1)) / 132.0;
        if self.pair == TilePair::Columns {
            // Few rows wait for B, of which memory gives no more than is on its way.
            let block = f64::from(self.columns) * BLOCK as f64 * spec.element.bytes() as f64;
            let blocks = 2 * self.splits * Self::stages(self.columns);
            rate = rate.min(items.min(clusters) * f64::from(blocks) * block / LATENCY);
        }
        let loading = operands / rate;
        // The two hinder each other where they are about the same.
        (computing.powi(3) + loading.powi(3)).cbrt()
    }
}

/// Parts of k of every product of a pass: those of all of it as one product. More than one where they are estimated to make that
/// notably faster, since a pass of few rows has too few tiles for the multiprocessors, or too narrow ones. A pass's products need not be
/// computed together to have the same bits, so this knows nothing of how it is cut.
pub(super) fn parts_in_pass(spec: &GemmSpec, sm_count: u32) -> u32 {
    /// What the estimate is not sure of.
    const NOTABLY: f64 = 0.95;
    if spec.layout == GemmLayout::Tn {
        return 1;
    }
    let pass = GemmSpec { m: spec.pass_rows, grid: GemmGrid::Persistent, ..spec.clone() };
    let all = shapes(&pass, sm_count);
    // The fastest is the first. More than two parts are in no kernel that sums over ranks.
    let cycles = |parts: u32| {
        let best = all.iter().find(|shape| shape.parts() == parts);
        best.map_or(f64::INFINITY, |shape| shape.cost(&pass, sm_count))
    };
    if cycles(2) < NOTABLY * cycles(1) { 2 } else { 1 }
}

/// The shapes that a product can have, least estimate first. `sm_margin` does not count: bits must not depend on it.
pub(super) fn shapes(spec: &GemmSpec, sm_count: u32) -> Vec<GemmShape> {
    /// Clusters have at most 8 CTAs, two for each part.
    const MOST_SPLITS: u32 = 4;
    /// Blocks that a part has at least.
    const LEAST_BLOCKS: usize = 8;
    let blocks = spec.k.div_ceil(BLOCK);
    let mut all = Vec::new();
    for columns in COLUMNS {
        for pair in [TilePair::Rows, TilePair::Columns] {
            let whole = GemmShape { columns, pair, splits: 1, turns: 1, hands: 1 };
            let (in_turn, handed) = (GemmShape { turns: 2, ..whole }, GemmShape { hands: 2, ..whole });
            // All parts have as many blocks.
            let fits = |splits: &u32| {
                let parts = *splits as usize;
                *splits <= whole.pieces() && blocks.is_multiple_of(parts) && blocks / parts >= LEAST_BLOCKS
            };
            let parts = (2..=MOST_SPLITS).filter(fits);
            all.extend([1].into_iter().chain(parts).map(|splits| GemmShape { splits, ..whole }));
            // A pair of CTAs for every unit would keep as much as all of the product.
            if fits(&2) && spec.grid == GemmGrid::Persistent {
                all.push(in_turn);
            }
            // All at the same time: who waits for a part then finds that it is being computed.
            let units = UnitGrid::new(&whole, spec.m, spec.n).count();
            let taken = GemmShape::hands_over(columns, spec.layout) && 2 * units <= sm_count as usize / 2;
            if fits(&2) && taken {
                all.push(handed);
            }
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
        assert_eq!(
            best(8192, 8192, 8192),
            GemmShape { columns: 256, pair: TilePair::Rows, splits: 1, turns: 1, hands: 1 }
        );
        // One row of tiles: nothing lies below.
        let few = best(128, 8192, 8192);
        assert_eq!(few.pair, TilePair::Columns);
        let units = UnitGrid::new(&few, 128, 8192).count() as u32 * few.splits * few.hands;
        assert!((50..=66).contains(&units), "{few:?}");
        // 40 units of 256 columns would leave a third of the multiprocessors idle in the last of three rounds.
        assert_eq!(best(1024, 10240, 8192).columns, 160);
        // 224 units of 256 columns are 3.4 rounds of 66, 256 of 224 are 3.9.
        assert_eq!(
            best(256, 57344, 8192),
            GemmShape { columns: 224, pair: TilePair::Rows, splits: 1, turns: 1, hands: 1 }
        );
    }

    #[test]
    fn parts_are_those_of_the_pass() {
        let parts = |m, n, k, layout| parts_in_pass(&GemmSpec::new(m, n, k, layout, ElementType::Bf16), 132);
        assert!(parts(128, 2560, 8192, GemmLayout::Nt) > 1);
        assert_eq!(parts(8192, 2560, 8192, GemmLayout::Nt), 1);
        assert_eq!(parts(8192, 8192, 8192, GemmLayout::Nt), 1);
        assert_eq!(parts(128, 2560, 8192, GemmLayout::Tn), 1);
        for rows in [1, 64, 100] {
            let whole = GemmSpec::new(128, 2560, 8192, GemmLayout::Nn, ElementType::Bf16);
            let some = GemmSpec { m: rows, ..whole.clone() };
            assert_eq!(parts_in_pass(&some, 132), parts_in_pass(&whole, 132));
        }
    }

    /// Every part has a piece of every tile, and as many blocks of k as the others.
    #[test]
    fn parts_are_alike() {
        for (m, n, k) in [(128, 2560, 8192), (8192, 8192, 192 * BLOCK), (1, 8, 8)] {
            let spec = GemmSpec::new(m, n, k, GemmLayout::Nt, ElementType::Bf16);
            for shape in shapes(&spec, 132) {
                assert!(
                    shape.splits <= shape.pieces() && k.div_ceil(BLOCK).is_multiple_of(shape.splits as usize)
                );
                let (of_both, most) = (shape.tellers() >= 2, shape.tellers() <= 2 * shape.splits);
                assert!(of_both && most && shape.tellers() >= shape.splits, "{shape:?}");
            }
        }
        let tellers = |columns, splits| {
            GemmShape { columns, pair: TilePair::Rows, splits, turns: 1, hands: 1 }.tellers()
        };
        // A part has the rows of one warpgroup, or of both.
        assert_eq!([(256, 1), (64, 2), (128, 3), (256, 4)].map(|(c, s)| tellers(c, s)), [2, 2, 4, 4]);
    }
}
