//! What computation and communication that overlap take from each other: SMs, and the last wave of a product.

use counterpoint_tiles::MAX_TILE_SIZE;
use serde::{Deserialize, Serialize};

use crate::figure_limits::{MOST_WORKERS, check_figure};
use crate::{CostError, ProblemSize};

/// How the computation and the communication of one rank get in each other's way. Without it, what overlaps costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerSharing {
    /// Workers of a rank: a GPU's multiprocessors. A computation takes all that are free.
    pub workers: usize,
    /// Workers that one collective holds from its start to its end, unless copy engines move its rows.
    pub communication: usize,
    /// Rows and columns of the tile of a matrix product that a worker computes at a time.
    pub gemm_tile: [usize; 2],
}

/// Ways in which a product of fewer tiles than workers splits its sum over those that would be idle.
const SPLIT: f64 = 4.0;

impl WorkerSharing {
    /// An H200: 132 multiprocessors, of which the kernels that move rows take 16 by default; tiles of the product kernel.
    pub const H200: WorkerSharing = WorkerSharing { workers: 132, communication: 16, gemm_tile: [128, 256] };

    /// Seconds of a product whose tiles fill all workers at `flops_per_second`: tiles are computed in waves, and
    /// the last wave takes as long as a full one.
    pub fn matmul_seconds(&self, size: ProblemSize, flops_per_second: f64) -> f64 {
        let ProblemSize { m, n, k } = size;
        let [rows, columns] = self.gemm_tile;
        let tiles = m.div_ceil(rows) * n.div_ceil(columns);
        let tile = 2.0 * (rows * columns) as f64 * k as f64 * self.workers as f64 / flops_per_second;
        if tiles >= self.workers {
            return tiles.div_ceil(self.workers) as f64 * tile;
        }
        f64::max(size.flops() / flops_per_second, tile / SPLIT)
    }

    /// Seconds until the first columns of such a product are done, where its tiles are computed column by column: until the wave has ended
    /// that has the last tiles of them.
    pub fn columns_done_seconds(&self, size: ProblemSize, columns: usize, flops_per_second: f64) -> f64 {
        let whole = self.matmul_seconds(size, flops_per_second);
        let [tile_rows, tile_columns] = self.gemm_tile;
        let tiles = |columns: usize| size.m.div_ceil(tile_rows) * columns.div_ceil(tile_columns);
        let waves = |columns: usize| tiles(columns).div_ceil(self.workers);
        whole * waves(columns) as f64 / waves(size.n).max(1) as f64
    }

    /// Seconds of products in one launch: each its rows of half-tiles and its K, of which all have `n` columns.
    /// Nothing is split.
    pub fn grouped_seconds(&self, problems: &[(usize, usize)], n: usize, flops_per_second: f64) -> f64 {
        let [rows, columns] = self.gemm_tile;
        let half_tiles: usize = problems.iter().map(|(half_tiles, _)| half_tiles).sum();
        let summands: usize = problems.iter().map(|(half_tiles, k)| half_tiles * k).sum();
        if half_tiles == 0 {
            return 0.0;
        }
        // Of their average K, in tiles of the width that leaves the last wave fullest.
        let k = summands as f64 / half_tiles as f64;
        let seconds = |(quarters, slower): (usize, f64)| {
            let width = (columns * quarters).div_ceil(4);
            let waves = (half_tiles * n.div_ceil(width)).div_ceil(2).div_ceil(self.workers);
            let flops = 2.0 * (rows * width) as f64 * k * (waves * self.workers) as f64;
            flops * slower / flops_per_second
        };
        [(4, 1.0), (3, 1.0), (2, 1.02)].map(seconds).into_iter().fold(f64::INFINITY, f64::min)
    }

    /// Speed of a computation that `taken` workers are missing to, of its usual one.
    pub fn speed_without(&self, taken: usize) -> f64 {
        self.workers.saturating_sub(taken).max(1) as f64 / self.workers as f64
    }

    pub(crate) fn validate(&self) -> Result<(), CostError> {
        check_figure("sharing.workers", self.workers, 1..=MOST_WORKERS)?;
        check_figure("sharing.communication", self.communication, 0..=self.workers - 1)?;
        self.gemm_tile
            .into_iter()
            .try_for_each(|size| check_figure("sharing.gemm_tile", size, 1..=MAX_TILE_SIZE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In tiles of half the width, since those leave fewer workers idle: five half-tiles are one wave, 265 three; K is that of all
    /// on average.
    #[test]
    fn problems_of_one_launch_take_waves_together() {
        let sharing = WorkerSharing { workers: 132, communication: 16, gemm_tile: [2, 2] };
        let waves = |problems: &[(usize, usize)]| sharing.grouped_seconds(problems, 2, 132.0) / (12.0 * 1.02);
        let all =
            [waves(&[(2, 3), (3, 3)]), waves(&[(260, 3), (5, 3)]), waves(&[(66, 2), (66, 4)]), waves(&[])];
        let close = all.iter().zip([1.0, 3.0, 1.0, 0.0]).all(|(found, wanted)| (found - wanted).abs() < 1e-9);
        assert!(close, "{all:?}");
        // A full wave of whole tiles.
        assert_eq!(sharing.grouped_seconds(&[(264, 3)], 2, 132.0), 24.0);
    }

    /// Three waves: two of five groups of columns end with the first. Of a product with fewer tiles than workers all end together.
    #[test]
    fn columns_are_done_with_their_waves() {
        let sharing = WorkerSharing { workers: 132, communication: 16, gemm_tile: [2, 2] };
        let done =
            |n, columns| sharing.columns_done_seconds(ProblemSize { m: 4, n, k: 3 }, columns, 132.0) / 24.0;
        let all = 2 * 150;
        assert_eq!([60, 120, 180, 240, 300].map(|columns| done(all, columns)), [1.0, 1.0, 2.0, 2.0, 3.0]);
        let few = [10, 20].map(|columns| done(20, columns));
        assert_eq!(few[0], few[1]);
        assert!(few[1] < 1.0);
    }

    /// At 132 operations a second a worker does one: a tile of 2 x 2 with K = 3 takes 24 seconds.
    #[test]
    fn products_take_whole_waves() {
        let sharing = WorkerSharing { workers: 132, communication: 16, gemm_tile: [2, 2] };
        let seconds = |m, n| sharing.matmul_seconds(ProblemSize { m, n, k: 3 }, 132.0);
        assert_eq!(seconds(2 * 132, 2), 24.0);
        assert_eq!(seconds(2 * 133, 2), 48.0);
        // Half a wave has its sums split; a single tile at most four ways.
        assert_eq!(seconds(2 * 66, 2), 12.0);
        assert_eq!(seconds(2, 2), 6.0);
        assert_eq!(sharing.speed_without(33), 0.75);
    }
}
