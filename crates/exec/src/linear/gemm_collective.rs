use counterpoint_plan::{
    Activations, CostModel, DType, LinearKind, LinearPlan, LinearSpec, PlanError, WaveGroups,
};

/// A matrix product and the collective that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmCollective {
    /// Every rank has a share of each element of the product; they are summed, each rank's rows on that rank.
    ReduceScatter,
    /// They are summed, on all ranks.
    AllReduce,
    /// Every rank has some rows of the first operand, which all ranks need.
    AllGather,
}

impl GemmCollective {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::ReduceScatter, Self::AllReduce, Self::AllGather];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
        }
    }
}

/// The forward of a linear layer as the product that each rank computes, `[m, n] = [m, k] [n, k]^T`, and its collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmCollectiveSpec {
    /// The collective.
    pub collective: GemmCollective,
    /// Ranks.
    pub ranks: usize,
    /// Rows of the product, of all ranks.
    pub m: usize,
    /// Columns of a rank's product.
    pub n: usize,
    /// Terms of a rank's product.
    pub k: usize,
    /// Type of the operands and the result.
    pub dtype: DType,
}

impl GemmCollectiveSpec {
    /// The layer that it is, in `groups` groups of rows: row-parallel where shares are summed, column-parallel where rows are
    /// gathered. Its Programs are [`lower_linear_forward`](counterpoint_schedule::lower_linear_forward)'s.
    ///
    /// # Errors
    /// [`PlanError::Linear`] when there are no ranks or a size is 0.
    pub fn plan(&self, groups: WaveGroups, cost: &CostModel) -> Result<LinearPlan, PlanError> {
        let Self { collective, ranks, m, n, k, dtype } = *self;
        let (kind, in_features, out_features) = match collective {
            GemmCollective::AllGather => (LinearKind::Column, k, n * ranks),
            GemmCollective::ReduceScatter | GemmCollective::AllReduce => (LinearKind::Row, k * ranks, n),
        };
        let activations = match collective {
            GemmCollective::AllReduce => Activations::Replicated,
            GemmCollective::ReduceScatter | GemmCollective::AllGather => Activations::SequenceParallel,
        };
        let spec =
            LinearSpec { kind, activations, tokens: m, in_features, out_features, has_bias: false, dtype };
        LinearPlan::new(spec, ranks, groups, cost)
    }

    /// Multiplications and additions of a rank.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}
