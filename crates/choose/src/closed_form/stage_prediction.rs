//! Predicted seconds of stages, and of all stages of a rank one behind the other.

use serde::{Deserialize, Serialize};

use counterpoint_cost::{CostModel, ReadyWork};
use counterpoint_plan::AttentionSpec;

/// Predicted seconds of one stage of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StagePrediction {
    /// Computation.
    pub compute_seconds: f64,
    /// The part of it that needs no received rows, where it begins before these are there.
    pub ready_seconds: f64,
    /// Group-cast of keys and values; 0 for stage 0.
    pub cast_seconds: f64,
    /// Group-reduce of their gradients; 0 for stage 0 and in a forward.
    pub reduce_seconds: f64,
}

impl StagePrediction {
    /// The same of a stage that does all work, and begins with what is `ready` before the rows are there that it receives. On a GPU
    /// of a rank's own gradients leave while it computes, and what is left is to add them.
    pub(crate) fn as_rows_arrive(
        self,
        ready: &ReadyWork,
        received: usize,
        spec: &AttentionSpec,
        cost: &CostModel,
    ) -> Self {
        let ready = ready.part(spec.heads_q, spec.delivery_parts(received), cost);
        let ready_seconds = ready * self.compute_seconds;
        let left = match cost.sharing {
            Some(_) => cost.link.bytes_per_second / cost.memory_bytes_per_second,
            None => 1.0,
        };
        Self { ready_seconds, reduce_seconds: left.min(1.0) * self.reduce_seconds, ..self }
    }
}

/// From the start of the first stage to the end of the last; hosted work is a stage after the first. Casts follow each other; a stage's computation waits for
/// the stage before, and for its cast once it has done what is ready; reduces follow each other, each after its stage's computation.
pub(crate) fn makespan(stages: impl IntoIterator<Item = StagePrediction>) -> f64 {
    let (mut cast_end, mut compute_end, mut reduce_end) = (0.0_f64, 0.0_f64, 0.0_f64);
    for stage in stages {
        cast_end += stage.cast_seconds;
        let begun = compute_end + stage.ready_seconds;
        compute_end = begun.max(cast_end) + stage.compute_seconds - stage.ready_seconds;
        if stage.reduce_seconds > 0.0 {
            reduce_end = reduce_end.max(compute_end) + stage.reduce_seconds;
        }
    }
    compute_end.max(reduce_end)
}
