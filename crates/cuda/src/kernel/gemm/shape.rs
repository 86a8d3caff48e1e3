//! How long a GEMM takes that is tiled in some way, as it is estimated, and what is chosen.

use counterpoint_tiles::gemm::{
    BLOCK, GemmLayout, GemmShape, ProblemSize, TILE_ROWS, TilePair, UnitGrid, Warpgroups,
};

use super::{GemmGrid, GemmSpec};
use crate::kernel::Scalar;

/// Estimates of what a tiling takes.
pub(super) trait TilingCost: Sized {
    /// Clusters that run at once on so many multiprocessors. These come in groups of up to 18, and a cluster lies in one of them: the
    /// numbers are those of an H200 with 132.
    fn clusters(self, workers: u32) -> u32;

    /// Cycles of a multiprocessor for one block of a tile while all of them compute; 4 a column is what the matrix unit takes. Narrow
    /// tiles wait for operands.
    fn block_cycles(self, spec: &GemmSpec) -> f64;

    /// What the end of each tile takes of its CTA's products, and that of the last one beyond that.
    fn end_cycles(self, output: Scalar) -> (f64, f64);

    /// Cycles of a multiprocessor for its part of a tile.
    fn unit_cycles(self, spec: &GemmSpec) -> f64;

    /// An estimate of the time that a product takes on `workers` multiprocessors, in their cycles. The constants here and above are fitted
    /// to times of 84 products in up to 16 shapes each on three H200s: what is chosen takes 0.6 % longer than the fastest in the mean, 5 %
    /// at most.
    fn cost(self, spec: &GemmSpec, workers: u32) -> f64;
}

impl TilingCost for GemmShape {
    fn clusters(self, workers: u32) -> u32 {
        match self.splits {
            0 | 1 => workers / 2,
            2 => workers * 30 / 132,
            3 => workers * 17 / 132,
            _ => workers * 15 / 132,
        }
    }

    fn block_cycles(self, spec: &GemmSpec) -> f64 {
        let along_k = spec.layout == GemmLayout::Nt;
        let below = match (self.warpgroups, self.columns) {
            (Warpgroups::Cooperative, 64) => 369.0,
            (Warpgroups::Cooperative, 80) => 480.0,
            (Warpgroups::Cooperative, 128) => 534.0,
            (Warpgroups::Cooperative, 160) if along_k => 686.0,
            (Warpgroups::Cooperative, 160) => 700.0,
            (Warpgroups::Cooperative, 192) => 814.0,
            (Warpgroups::Cooperative, 224) => 990.0,
            (Warpgroups::Cooperative, _) => 1060.0,
            (Warpgroups::Pingpong, 128) => 542.0,
            (Warpgroups::Pingpong, 160) if along_k => 675.0,
            (Warpgroups::Pingpong, 160) => 700.0,
            (Warpgroups::Pingpong, 176) => 745.0,
            // Shapes for warps by themselves are not estimated here (portable.rs).
            (Warpgroups::Pingpong | Warpgroups::Warps { .. }, _) => 798.0,
        };
        match self.pair {
            TilePair::Rows => below,
            // Of one row of tiles both CTAs have rows, and load less of them.
            TilePair::Columns if self.columns <= 80 && spec.size.m <= TILE_ROWS => below - 46.0,
            TilePair::Columns => below + 20.0,
        }
    }

    fn end_cycles(self, output: Scalar) -> (f64, f64) {
        match self.warpgroups {
            // f32 are stored in twice as many chunks, each of which waits for room.
            Warpgroups::Cooperative if output == Scalar::F32 => (7000.0, 0.0),
            Warpgroups::Cooperative => (3200.0, 0.0),
            // Rows of 32 bytes.
            Warpgroups::Pingpong if self.chunk_columns() < 32 => (1750.0, 7150.0),
            Warpgroups::Pingpong | Warpgroups::Warps { .. } => (200.0, 7150.0),
        }
    }

    fn unit_cycles(self, spec: &GemmSpec) -> f64 {
        /// Until parts know of each other, and bytes of theirs that a multiprocessor sends in a cycle.
        const BARRIER: f64 = 3800.0;
        const SENT: f64 = 9.7;
        /// Bytes of a part that is stored, there and back.
        const KEPT: f64 = 27.0;
        /// Until the pair that takes them over hears of sums in memory.
        const HEAR: f64 = 7000.0;
        let splits = f64::from(self.splits);
        let bytes = f64::from(TILE_ROWS as u32 * self.columns) * size_of::<f32>() as f64;
        let exchange = match (self.splits, self.serial_parts, self.handed_parts) {
            (0 | 1, 0 | 1, 0 | 1) => 0.0,
            (0 | 1, 0 | 1, _) => HEAR + 2.0 * bytes / KEPT,
            (0 | 1, _, _) => 2.0 * bytes / KEPT,
            _ => BARRIER + bytes * (splits - 1.0) / splits / SENT,
        };
        let at_once = f64::from(self.splits * self.handed_parts);
        let blocks = spec.size.k.div_ceil(BLOCK) as f64 / at_once;
        blocks * self.block_cycles(spec) + self.end_cycles(spec.output).0 + exchange
    }

    fn cost(self, spec: &GemmSpec, workers: u32) -> f64 {
        /// Bytes from memory in a cycle, of all 132 multiprocessors, with the time until the first of them come.
        const MEMORY: f64 = 1400.0;
        /// From a load of B's to its bytes while all multiprocessors load.
        const LATENCY: f64 = 3800.0;
        let items =
            UnitGrid::new(&self, spec.size.m, spec.size.n).count() as f64 * f64::from(self.handed_parts);
        let clusters = f64::from(self.clusters(workers).max(1));
        let computing = (items / clusters).ceil() * self.unit_cycles(spec) + self.end_cycles(spec.output).1;
        let operands = (spec.size.m + spec.size.n) as f64 * spec.size.k as f64 * spec.element.bytes() as f64;
        let mut rate = MEMORY * f64::from(workers.max(1)) / 132.0;
        if self.pair == TilePair::Columns {
            // Few rows wait for B, of which memory gives no more than is on its way.
            let block = f64::from(self.columns) * BLOCK as f64 * spec.element.bytes() as f64;
            let blocks = 2 * self.splits * Self::stages(self.columns, spec.layout);
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
    let pass = GemmSpec {
        size: ProblemSize { m: spec.pass_rows, n: spec.pass_columns, ..spec.size },
        grid: GemmGrid::Persistent,
        ..spec.clone()
    };
    let all = shapes(&pass, sm_count);
    // The fastest is the first. More than two parts are in no kernel that sums over ranks.
    let cycles = |parts: u32| {
        let best = all.iter().find(|shape| shape.parts() == parts);
        best.map_or(f64::INFINITY, |shape| shape.cost(&pass, sm_count))
    };
    if cycles(2) < NOTABLY * cycles(1) { 2 } else { 1 }
}

/// The shapes that a product can have, least estimate first. Bits must not depend on `sm_margin`, so where there is one those come first
/// that have as many parts as the best without it.
pub(super) fn shapes(spec: &GemmSpec, sm_count: u32) -> Vec<GemmShape> {
    /// Clusters have at most 8 CTAs, two for each part.
    const MOST_SPLITS: u32 = 4;
    /// Blocks that a part has at least.
    const LEAST_BLOCKS: usize = 8;
    let blocks = spec.size.k.div_ceil(BLOCK);
    let mut all = Vec::new();
    for pair in [TilePair::Rows, TilePair::Columns] {
        for &columns in Warpgroups::Cooperative.columns() {
            let whole = GemmShape::whole(columns, pair);
            let (serial, handed) =
                (GemmShape { serial_parts: 2, ..whole }, GemmShape { handed_parts: 2, ..whole });
            // All parts have as many blocks.
            let fits = |splits: &u32| {
                let parts = *splits as usize;
                *splits <= whole.pieces() && blocks.is_multiple_of(parts) && blocks / parts >= LEAST_BLOCKS
            };
            let parts = (2..=MOST_SPLITS).filter(fits);
            all.extend([1].into_iter().chain(parts).map(|splits| GemmShape { splits, ..whole }));
            // A pair of CTAs for every unit would keep as much as all of the product.
            if fits(&2) && spec.grid == GemmGrid::Persistent {
                all.push(serial);
            }
            // All at the same time: who waits for a part then finds that it is being computed.
            let units = UnitGrid::new(&whole, spec.size.m, spec.size.n).count();
            let taken = GemmShape::hands_over(columns, spec.layout) && 2 * units <= sm_count as usize / 2;
            if fits(&2) && taken {
                all.push(handed);
            }
        }
        // A pair of CTAs for every unit would leave nothing to the second warpgroup.
        if spec.grid == GemmGrid::Persistent {
            let tiles = Warpgroups::Pingpong.columns().iter();
            all.extend(tiles.map(|&columns| GemmShape {
                warpgroups: Warpgroups::Pingpong,
                ..GemmShape::whole(columns, pair)
            }));
        }
    }
    let sort = |shapes: &mut [GemmShape], workers: u32| {
        shapes.sort_by(|a, b| a.cost(spec, workers).total_cmp(&b.cost(spec, workers)));
    };
    sort(&mut all, sm_count);
    if let (Some(best), 1..) = (all.first().copied(), spec.sm_margin) {
        // 21 rounds of tiles on all multiprocessors can be 22 on four fewer.
        sort(&mut all, sm_count.saturating_sub(spec.sm_margin));
        all.sort_by_key(|shape| shape.parts() != best.parts());
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::kernel::ElementType;

    fn best(m: usize, n: usize, k: usize) -> GemmShape {
        shapes(&GemmSpec::new(m, n, k, GemmLayout::Nt, ElementType::Bf16), 132)[0]
    }

    #[test]
    fn shapes_fit_a_multiprocessor() {
        for layout in GemmLayout::ALL {
            for warpgroups in [Warpgroups::Cooperative, Warpgroups::Pingpong] {
                for &columns in warpgroups.columns() {
                    assert!(GemmShape::shared_bytes(columns, layout) <= 232_448, "{columns}");
                    assert!((4..=8).contains(&GemmShape::stages(columns, layout)), "{columns}");
                }
            }
        }
    }

    #[test]
    fn large_products_take_large_tiles_and_few_rows_many() {
        let pingpong = |columns| GemmShape {
            warpgroups: Warpgroups::Pingpong,
            ..GemmShape::whole(columns, TilePair::Rows)
        };
        assert_eq!(best(8192, 8192, 8192), pingpong(192));
        // One round of tiles: no other tile's products hide an end.
        assert_eq!(best(512, 8192, 8192), GemmShape::whole(256, TilePair::Rows));
        // One row of tiles: nothing lies below.
        let few = best(128, 8192, 8192);
        assert_eq!(few.pair, TilePair::Columns);
        let units = UnitGrid::new(&few, 128, 8192).count() as u32 * few.splits * few.handed_parts;
        assert!((50..=66).contains(&units), "{few:?}");
        // 40 units of 256 columns would leave a third of the multiprocessors idle in the last of three rounds.
        assert_eq!(best(1024, 10240, 8192).columns, 160);
        // 224 units of 256 columns are 3.4 rounds of 66, 326 of 176 are 4.94.
        assert_eq!(best(256, 57344, 8192), pingpong(176));
    }

    /// 1376 units of 192 columns are 21 rounds of 66 clusters and 22 of 64; 1024 of 256 are 16 of both.
    #[test]
    fn a_margin_may_take_a_round() {
        let spec = GemmSpec::new(8192, 8192, 7168, GemmLayout::Nn, ElementType::Bf16);
        assert_eq!(shapes(&spec, 132)[0].columns, 192);
        let spec = GemmSpec { sm_margin: 4, ..spec };
        assert_eq!(shapes(&spec, 132)[0], GemmShape::whole(256, TilePair::Rows));
        // Parts are those of the product without a margin.
        let few = GemmSpec::new(128, 2560, 8192, GemmLayout::Nt, ElementType::Bf16);
        for sm_margin in [0, 4, 100] {
            let all = shapes(&GemmSpec { sm_margin, ..few.clone() }, 132);
            assert_eq!(all[0].parts(), shapes(&few, 132)[0].parts());
        }
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
            let some = GemmSpec { size: ProblemSize { m: rows, ..whole.size }, ..whole.clone() };
            assert_eq!(parts_in_pass(&some, 132), parts_in_pass(&whole, 132));
        }
        for columns in [512, 256] {
            let whole = GemmSpec::new(128, 2560, 8192, GemmLayout::Nn, ElementType::Bf16);
            let some = GemmSpec { size: ProblemSize { n: columns, ..whole.size }, ..whole.clone() };
            assert_eq!(parts_in_pass(&some, 132), parts_in_pass(&whole, 132));
        }
    }

    /// Of every product of a kept run the shape that is chosen took hardly longer than the fastest of those that were timed.
    #[test]
    fn what_is_chosen_is_nearly_the_fastest() {
        let run = include_str!("../../../../../benches/runs/2026-11-23-h200-products/bench-gemm-tiles.txt");
        let mut timed: BTreeMap<[&str; 4], Vec<(String, f64)>> = BTreeMap::new();
        for line in run.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [m, n, k, layout @ ("nt" | "nn" | "tn"), _, tile, pair, parts, seconds, ..] = words[..] {
                let tile = format!("{tile} {pair} {parts}");
                timed.entry([m, n, k, layout]).or_default().push((tile, seconds.parse().unwrap()));
            }
        }
        let losses: Vec<f64> = timed
            .iter()
            .map(|([m, n, k, name], rows)| {
                let layout = GemmLayout::ALL.into_iter().find(|layout| layout.name() == *name).unwrap();
                let [m, n, k] = [m, n, k].map(|size| size.parse().unwrap());
                let mut spec = GemmSpec::new(m, n, k, layout, ElementType::Bf16);
                if layout == GemmLayout::Tn {
                    spec.output = Scalar::F32;
                }
                let fastest = rows.iter().map(|row| row.1).fold(f64::INFINITY, f64::min);
                // Shapes that were not timed would be new, or were estimated to be slow.
                let of = |shape: &GemmShape| {
                    let label = label(shape);
                    rows.iter().find(|row| row.0 == label).map(|row| row.1)
                };
                shapes(&spec, 132).iter().find_map(of).unwrap() / fastest - 1.0
            })
            .collect();
        assert_eq!(losses.len(), 57);
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        let worst = losses.iter().copied().fold(0.0, f64::max);
        assert!(mean < 0.007 && worst < 0.05, "{mean} in the mean, {worst} at most");
    }

    /// As `bench gemm` prints it.
    fn label(shape: &GemmShape) -> String {
        let GemmShape { columns, pair, warpgroups, splits, serial_parts, handed_parts } = *shape;
        let pair = if pair == TilePair::Rows { "2x1" } else { "1x2" };
        let pingpong = if warpgroups == Warpgroups::Pingpong { "p" } else { "" };
        let parts = match (serial_parts, handed_parts) {
            (1, 1) => format!("/{splits}"),
            (_, 1) => format!("+{serial_parts}"),
            _ => format!(">{handed_parts}"),
        };
        format!("128x{columns}{pingpong} {pair} {parts}")
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
                let (of_both, most) = (shape.raises() >= 2, shape.raises() <= 2 * shape.splits);
                assert!(of_both && most && shape.raises() >= shape.splits, "{shape:?}");
            }
        }
        let raises =
            |columns, splits| GemmShape { splits, ..GemmShape::whole(columns, TilePair::Rows) }.raises();
        // A part has the rows of one warpgroup, or of both.
        assert_eq!([(256, 1), (64, 2), (128, 3), (256, 4)].map(|(c, s)| raises(c, s)), [2, 2, 4, 4]);
    }
}
