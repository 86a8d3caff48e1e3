use serde::{Deserialize, Serialize};

use crate::{AttentionSpec, CostModel, GroupPart, Plan, PlanConfig, StagePlan, Topology};

/// Predicted seconds of one stage of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StagePrediction {
    /// Computation.
    pub compute_seconds: f64,
    /// Group-cast of keys and values; 0 for stage 0.
    pub cast_seconds: f64,
    /// Group-reduce of their gradients; 0 for stage 0 and in a forward.
    pub reduce_seconds: f64,
}

/// Predicted seconds of one rank in one direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankPrediction {
    /// By stage.
    pub stages: Vec<StagePrediction>,
    /// From the start to the end of the last stage, what overlaps counted once.
    pub seconds: f64,
}

/// What a plan is expected to take, rank by rank. Ranks are looked at one by one: nobody waits for a late sender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The forward, by rank.
    pub forward: Vec<RankPrediction>,
    /// The backward, by rank.
    pub backward: Vec<RankPrediction>,
}

impl Prediction {
    /// Predicts `plan` with the machine of `config`. Where the stage solver spreads a rank's sending over its stages, here
    /// every stage is charged what it really sends.
    pub fn new(plan: &Plan, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        let (cost, topology) = (&config.cost, &config.topology);
        let kv_bytes = spec.kv_row_bytes() as f64;
        let gradient_bytes = spec.kv_gradient_row_bytes() as f64;
        let predict = |rank: usize, stages: &[StagePlan], flops: &dyn Fn(u64) -> f64, reduce_bytes: f64| {
            let stages = stages.iter().map(|stage| {
                let compute_seconds = match stage.area {
                    0 => 0.0,
                    area => cost.launch_seconds + flops(area),
                };
                let busiest = Busiest::new(&stage.part, rank, topology);
                StagePrediction {
                    compute_seconds,
                    cast_seconds: busiest.seconds(kv_bytes, cost),
                    reduce_seconds: busiest.seconds(reduce_bytes, cost),
                }
            });
            RankPrediction::new(stages.collect())
        };
        let forward_flops = |area| spec.flops_forward(area) / cost.forward_flops_per_second;
        let backward_flops = |area| spec.flops_backward(area) / cost.backward_flops_per_second;
        Self {
            forward: plan
                .ranks
                .iter()
                .map(|rank| predict(rank.rank, &rank.forward, &forward_flops, 0.0))
                .collect(),
            backward: plan
                .ranks
                .iter()
                .map(|rank| predict(rank.rank, &rank.backward, &backward_flops, gradient_bytes))
                .collect(),
        }
    }

    /// Seconds of the slowest rank's forward.
    pub fn forward_seconds(&self) -> f64 {
        self.forward.iter().map(|rank| rank.seconds).fold(0.0, f64::max)
    }

    /// Seconds of the slowest rank's backward.
    pub fn backward_seconds(&self) -> f64 {
        self.backward.iter().map(|rank| rank.seconds).fold(0.0, f64::max)
    }
}

impl RankPrediction {
    /// Casts follow each other; a stage's computation waits for its cast and for the stage before; reduces follow each
    /// other, each after its stage's computation.
    fn new(stages: Vec<StagePrediction>) -> Self {
        let (mut cast_end, mut compute_end, mut reduce_end) = (0.0_f64, 0.0_f64, 0.0_f64);
        for stage in &stages {
            cast_end += stage.cast_seconds;
            compute_end = compute_end.max(cast_end) + stage.compute_seconds;
            if stage.reduce_seconds > 0.0 {
                reduce_end = reduce_end.max(compute_end) + stage.reduce_seconds;
            }
        }
        Self { stages, seconds: compute_end.max(reduce_end) }
    }
}

/// Rows of the busier direction of a rank's links in one collective: they send and receive at the same time.
struct Busiest {
    near: u64,
    far: u64,
}

impl Busiest {
    fn new(part: &GroupPart, rank: usize, topology: &Topology) -> Self {
        let node = topology.node(rank);
        let (mut sent, mut received) = ([0, 0], [0, 0]);
        let place = |other: u32| usize::from(topology.node(other as usize) != node);
        for split in &part.owned {
            for &other in &split.ranks {
                sent[place(other)] += split.rows.len() as u64;
            }
        }
        for split in &part.remote {
            received[place(split.rank)] += split.rows.len() as u64;
        }
        Self { near: sent[0].max(received[0]), far: sent[1].max(received[1]) }
    }

    /// Links inside the node and the network work side by side.
    fn seconds(&self, row_bytes: f64, cost: &CostModel) -> f64 {
        let bytes = |rows: u64| (rows as f64 * row_bytes) as u64;
        f64::max(cost.link.seconds(bytes(self.near)), cost.network.seconds(bytes(self.far)))
    }
}
