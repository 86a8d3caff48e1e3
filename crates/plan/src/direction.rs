use crate::{AttentionSpec, CostModel, StagePrediction};

/// The half of a training step that is planned: their stages are cut apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    /// Seconds of one stage of one rank that computes `area` pairs, and whose links carry `rows` in their busier
    /// direction. What is reported and what stages are chosen by is this one function.
    pub(crate) fn predict(
        self,
        area: u64,
        rows: LinkRows,
        spec: &AttentionSpec,
        cost: &CostModel,
    ) -> StagePrediction {
        let (compute_seconds, reduce_bytes) = match self {
            Direction::Forward => (spec.flops_forward(area) / cost.forward_flops_per_second, 0),
            Direction::Backward => {
                (spec.flops_backward(area) / cost.backward_flops_per_second, spec.kv_gradient_row_bytes())
            }
        };
        StagePrediction {
            compute_seconds: if area == 0 { 0.0 } else { cost.launch_seconds + compute_seconds },
            cast_seconds: rows.seconds(spec.kv_row_bytes(), cost),
            reduce_seconds: rows.seconds(reduce_bytes, cost),
        }
    }
}

impl Direction {
    /// Seconds of the hosted work of one rank: `area` pairs, and `rows` hosted query rows in the busier direction of its
    /// links. Results travel back as queries have come.
    pub(crate) fn predict_hosted(
        self,
        area: u64,
        rows: LinkRows,
        spec: &AttentionSpec,
        cost: &CostModel,
    ) -> StagePrediction {
        let bytes = match self {
            Direction::Forward => spec.hosted_forward_bytes(),
            Direction::Backward => spec.hosted_backward_bytes(),
        };
        let cast_seconds = rows.seconds(bytes.tensors, cost) + rows.seconds(bytes.statistics, cost);
        let reduce_seconds = rows.seconds(bytes.results, cost);
        StagePrediction {
            cast_seconds,
            reduce_seconds,
            ..self.predict(area, LinkRows::default(), spec, cost)
        }
    }
}

/// Key rows that one rank sends or receives in one collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkRows {
    /// Inside the node.
    pub(crate) near: u64,
    /// Between nodes.
    pub(crate) far: u64,
}

impl LinkRows {
    /// Sent and received at the same time: what takes time is the larger of the two on each link.
    pub(crate) fn busier(sent: Self, received: Self) -> Self {
        Self { near: sent.near.max(received.near), far: sent.far.max(received.far) }
    }

    /// Links inside the node and the network work side by side.
    fn seconds(self, row_bytes: usize, cost: &CostModel) -> f64 {
        let row_bytes = row_bytes as u64;
        f64::max(cost.link.seconds(self.near * row_bytes), cost.network.seconds(self.far * row_bytes))
    }
}

/// From the start of the first stage to the end of the last; hosted work is a stage after the first. Casts follow each other; a stage's computation waits for
/// its cast and for the stage before; reduces follow each other, each after its stage's computation.
pub(crate) fn makespan(stages: impl IntoIterator<Item = StagePrediction>) -> f64 {
    let (mut cast_end, mut compute_end, mut reduce_end) = (0.0_f64, 0.0_f64, 0.0_f64);
    for stage in stages {
        cast_end += stage.cast_seconds;
        compute_end = compute_end.max(cast_end) + stage.compute_seconds;
        if stage.reduce_seconds > 0.0 {
            reduce_end = reduce_end.max(compute_end) + stage.reduce_seconds;
        }
    }
    compute_end.max(reduce_end)
}
