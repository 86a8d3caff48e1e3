//! Predicted seconds of a stage, forward and backward: its computation, its group-cast, its group-reduce.

use counterpoint_cost::{CostModel, TileCost};
use counterpoint_plan::{AttentionSpec, HostedWork};

use super::link_rows::LinkRows;
use super::stage_prediction::StagePrediction;

/// The half of a training step that is planned: their stages are cut apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    /// Seconds of one stage of one rank that computes `area` pairs of its `q_rows` query rows, and whose links carry `rows`
    /// in their busier direction. What is reported and what stages are cut by is this one function.
    pub(crate) fn predict(
        self,
        stage: StageWork,
        rows: LinkRows,
        spec: &AttentionSpec,
        cost: &CostModel,
    ) -> StagePrediction {
        let compute_seconds = match stage.area {
            0 => 0.0,
            area => {
                let passed = match stage.remote {
                    true => self.remote_seconds(stage.q_rows, spec, cost),
                    false => self.own_seconds(stage.own_rows, spec, cost),
                };
                self.launch_seconds(stage.q_rows, spec, cost)
                    + passed
                    + area as f64 * self.pair_seconds(spec, cost)
            }
        };
        StagePrediction { compute_seconds, ..self.transfers(rows, spec, cost) }
    }

    /// A stage whose links carry `rows` in their busier direction, without its computation.
    pub(crate) fn transfers(self, rows: LinkRows, spec: &AttentionSpec, cost: &CostModel) -> StagePrediction {
        let reduce_bytes = match self {
            Direction::Forward => 0,
            Direction::Backward => spec.kv_gradient_row_bytes(),
        };
        StagePrediction {
            compute_seconds: 0.0,
            ready_seconds: 0.0,
            cast_seconds: rows.seconds(spec.kv_row_bytes(), cost),
            reduce_seconds: rows.seconds(reduce_bytes, cost),
        }
    }

    /// Seconds of one pair of all query heads.
    pub(crate) fn pair_seconds(self, spec: &AttentionSpec, cost: &CostModel) -> f64 {
        let (flops, rate) = self.pair(spec, cost);
        let by_tiles = self.tile_cost(cost).map(|(tile, _)| tile.pair_seconds(flops, rate));
        by_tiles.unwrap_or(flops / rate)
    }

    /// Seconds that a stage costs however little it computes.
    pub(crate) fn launch_seconds(self, q_rows: usize, spec: &AttentionSpec, cost: &CostModel) -> f64 {
        let (flops, rate) = self.pair(spec, cost);
        let head_flops = flops / spec.heads_q.max(1) as f64;
        let by_tiles = self.tile_cost(cost).map_or(0.0, |(tile, workers)| {
            let heads = match self {
                Direction::Forward => spec.heads_q,
                Direction::Backward => spec.heads_kv,
            };
            tile.start_seconds + tile.tiles_seconds(q_rows, heads, workers, head_flops, rate)
        });
        cost.launch_seconds + by_tiles
    }

    /// Seconds that one more stage with work adds to the local one: a state is left and begun from, or dq is added to once more.
    pub(crate) fn remote_seconds(self, q_rows: usize, spec: &AttentionSpec, cost: &CostModel) -> f64 {
        if cost.tiles.is_none() {
            // The CPU's rates hold this.
            return 0.0;
        }
        let sum = spec.dtype.accumulator().size();
        // Written once, read at half the rate: a tile waits for its state before it can end. Likewise sums of dq.
        let bytes = match self {
            Direction::Forward => 3 * spec.heads_q * (spec.head_dim_v + 2) * sum,
            Direction::Backward => 3 * spec.heads_q * spec.head_dim * sum,
        };
        (q_rows * bytes) as f64 / cost.memory_bytes_per_second
    }

    /// Seconds to make results of a stage's own partial sums of the gradients of own rows, where it does all work.
    pub(crate) fn own_seconds(self, own_rows: usize, spec: &AttentionSpec, cost: &CostModel) -> f64 {
        if own_rows == 0 || self == Direction::Forward {
            return 0.0;
        }
        let bytes = own_rows * (spec.kv_gradient_row_bytes() + spec.kv_row_bytes());
        cost.launch_seconds + bytes as f64 / cost.memory_bytes_per_second
    }

    fn pair(self, spec: &AttentionSpec, cost: &CostModel) -> (f64, f64) {
        match self {
            Direction::Forward => (spec.flops_forward(1), cost.forward_flops_per_second),
            Direction::Backward => (spec.flops_backward(1), cost.backward_flops_per_second),
        }
    }

    fn tile_cost(self, cost: &CostModel) -> Option<(TileCost, usize)> {
        cost.tiles.map(|tiles| match self {
            Direction::Forward => (tiles.forward, tiles.workers),
            Direction::Backward => (tiles.backward, tiles.workers),
        })
    }
}

/// What one rank computes in one stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageWork {
    /// Unmasked pairs.
    pub(crate) area: u64,
    /// The rank's query rows, all of them.
    pub(crate) q_rows: usize,
    /// Own key rows, where a stage does all work with those received; else 0.
    pub(crate) own_rows: usize,
    /// Whether it comes after the local work.
    pub(crate) remote: bool,
}

impl Direction {
    /// Seconds of one rank's hosted work, which has `rows` query rows in the busier direction of its links. Results travel
    /// back as queries have come. Of `merged_rows` query rows results are made once more, as hosts and stages compute for some of them.
    pub(crate) fn predict_hosted(
        self,
        work: &HostedWork,
        rows: LinkRows,
        merged_rows: usize,
        spec: &AttentionSpec,
        cost: &CostModel,
    ) -> StagePrediction {
        let bytes = match self {
            Direction::Forward => spec.hosted_forward_bytes(),
            Direction::Backward => spec.hosted_backward_bytes(),
        };
        let stage = StageWork { area: work.area, q_rows: work.q_rows, own_rows: 0, remote: false };
        let computed = self.predict(stage, LinkRows::default(), spec, cost);
        StagePrediction {
            compute_seconds: computed.compute_seconds + self.merge_seconds(merged_rows, spec, cost),
            cast_seconds: rows.seconds(bytes.tensors, cost) + rows.seconds(bytes.statistics, cost),
            reduce_seconds: rows.seconds(bytes.results, cost),
            ..computed
        }
    }

    /// Seconds to leave results of so many rows in the accumulator's type, to merge others into them, and to make results of them.
    fn merge_seconds(self, q_rows: usize, spec: &AttentionSpec, cost: &CostModel) -> f64 {
        if q_rows == 0 {
            return 0.0;
        }
        let head_dim = if self == Direction::Forward { spec.head_dim_v } else { spec.head_dim };
        let (sum, result) = (spec.dtype.accumulator().size(), spec.dtype.size());
        let bytes = q_rows * spec.heads_q * head_dim * (2 * sum + result);
        2.0 * cost.launch_seconds + bytes as f64 / cost.memory_bytes_per_second
    }
}
