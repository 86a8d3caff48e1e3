//! Seconds of attention operations on a machine: by the tiles that kernels compute, or in proportion to unmasked pairs where no tiles were
//! measured.

use counterpoint_tiles::{TileCounting, TileDirection};

use crate::tile_costs::{CtaWork, TileShape};
use crate::{AttentionWork, CostModel, TileCost};

/// A kernel, what its CTAs compute, how many they are, operations of a pair, and operations a second.
type DirectionWork = (TileCost, CtaWork, usize, f64, f64);

impl CostModel {
    /// Seconds of one operation of the attention forward, its launch included.
    pub fn forward_seconds(&self, work: &AttentionWork<'_>) -> f64 {
        let rate = self.forward_flops_per_second;
        let by_tiles = self.tiles.and_then(|tiles| {
            tiles.forward.seconds(work, TileDirection::Forward, tiles.workers, work.pair_flops(), rate)
        });
        self.operation_seconds(by_tiles.unwrap_or(work.flops() / rate), work)
    }

    /// Seconds of one operation of the attention backward, its launch included.
    pub fn backward_seconds(&self, work: &AttentionWork<'_>) -> f64 {
        let rate = self.backward_flops_per_second;
        let pair_flops = 2.5 * work.pair_flops();
        let by_tiles = self.tiles.and_then(|tiles| {
            tiles.backward.seconds(work, TileDirection::Backward, tiles.workers, pair_flops, rate)
        });
        self.operation_seconds(by_tiles.unwrap_or(2.5 * work.flops() / rate), work)
    }

    /// The shapes of tiles in which a forward and a backward of `work` take least; `None` without tiles.
    pub fn tile_shapes(&self, work: &AttentionWork<'_>) -> Option<[TileShape; 2]> {
        let tiles = self.tiles?;
        let [forward, backward] = TileCounting::both(work.bands, work.q_rows, work.k_rows).ok()?;
        let forward = tiles.forward.least_shape(work, &forward, tiles.workers)?;
        Some([forward, tiles.backward.least_shape(work, &backward, tiles.workers)?])
    }

    /// [`CostModel::forward_seconds`] and [`CostModel::backward_seconds`] in tiles of these shapes; `None` without tiles.
    pub fn seconds_in(&self, work: &AttentionWork<'_>, shapes: [TileShape; 2]) -> Option<[f64; 2]> {
        let of_directions = self.cta_work(work, shapes)?;
        Some(of_directions.map(|(tile, of_ctas, workers, pair_flops, rate)| {
            let columns = of_ctas.until_last(workers);
            self.operation_seconds(tile.run_seconds(work, columns, workers, pair_flops, rate), work)
        }))
    }

    /// Seconds that `work` adds to a long forward and to a long backward in which it is among other work, in tiles of these shapes; `None`
    /// without tiles.
    pub fn share_seconds(&self, work: &AttentionWork<'_>, shapes: [TileShape; 2]) -> Option<[f64; 2]> {
        let [forward, backward] = self.cta_work(work, shapes)?;
        let share = |(tile, _, workers, pair_flops, rate): &DirectionWork, columns: f64| {
            columns * tile.column_seconds(*workers, *pair_flops, *rate) / *workers as f64
        };
        // Key tiles are there for other rows, too.
        Some([share(&forward, forward.1.all), share(&backward, backward.1.blocks)])
    }

    fn cta_work(&self, work: &AttentionWork<'_>, shapes: [TileShape; 2]) -> Option<[DirectionWork; 2]> {
        let tiles = self.tiles?;
        let [forward, backward] = TileCounting::both(work.bands, work.q_rows, work.k_rows).ok()?;
        let (workers, flops) = (tiles.workers, work.pair_flops());
        let forward = tiles.forward.cta_work(work, &forward, shapes[0])?;
        let backward = tiles.backward.cta_work(work, &backward, shapes[1])?;
        Some([
            (tiles.forward, forward, workers, flops, self.forward_flops_per_second),
            (tiles.backward, backward, workers, 2.5 * flops, self.backward_flops_per_second),
        ])
    }

    fn operation_seconds(&self, computing: f64, work: &AttentionWork<'_>) -> f64 {
        // Without measured tiles these bytes are part of the rates.
        let passed = if self.tiles.is_some() { work.passed_bytes as f64 } else { 0.0 };
        self.launch_seconds + computing + passed / self.memory_bytes_per_second
    }
}
