//! Fused GEMM and collective as calls: reduce-scatter or all-reduce behind a product, all-gather before one.

use counterpoint_choose::{GemmExchange, LayerGroups};
use counterpoint_cost::{CostModel, ProblemSize};
use counterpoint_plan::{DType, GemmCollective, LinearPlan, PlanError, WaveGroups};
use counterpoint_schedule::{OverlapPolicy, lower_linear_forward};

use crate::{Backend, ExecError, Group, HostTensor, Machine, Prepared, TensorFault, WorldConfig};

/// A Program made ready on a rank of a machine.
pub type PreparedOn<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;

/// How a product and its collective share a machine. Results have the same bits however they do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GemmOverlap<'a> {
    /// One after the other or as one kernel, whichever is predicted to end sooner by these costs.
    Predicted(&'a CostModel),
    /// By this policy.
    Policy(OverlapPolicy),
}

impl Default for GemmOverlap<'_> {
    /// By the costs of a machine that nobody has measured.
    fn default() -> Self {
        Self::Predicted(&CostModel::H200)
    }
}

/// The forward of a linear layer as the product that each rank computes, `[m, n] = [m, k] [n, k]^T`, and its collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmCollectiveSpec {
    /// The collective.
    pub collective: GemmCollective,
    /// Ranks.
    pub ranks: usize,
    /// A rank's product, whose rows are those of all ranks.
    pub size: ProblemSize,
    /// Type of the operands and the result.
    pub dtype: DType,
}

impl GemmCollectiveSpec {
    /// The layer that it is, in `groups` groups of rows: row-parallel where partial sums are summed, column-parallel where rows are
    /// gathered. Its Programs are [`lower_linear_forward`](counterpoint_schedule::lower_linear_forward)'s.
    ///
    /// # Errors
    /// [`PlanError::Linear`] when there are no ranks or a size is 0.
    pub fn plan(&self, groups: &LayerGroups, cost: &CostModel) -> Result<LinearPlan, PlanError> {
        let Self { collective, ranks, size, dtype } = *self;
        let size = match collective {
            GemmCollective::AllGather => ProblemSize { n: size.n * ranks, ..size },
            GemmCollective::ReduceScatter | GemmCollective::AllReduce => {
                ProblemSize { k: size.k * ranks, ..size }
            }
        };
        groups.plan(collective.layer(size, dtype), ranks, cost)
    }

    /// The policy under which it runs: by prediction [`OverlapPolicy::SEQUENTIAL`] or [`OverlapPolicy::FUSED`].
    pub fn policy(&self, overlap: GemmOverlap<'_>) -> OverlapPolicy {
        let Self { collective, ranks, size, dtype } = *self;
        let cost = match overlap {
            GemmOverlap::Policy(policy) => return policy,
            GemmOverlap::Predicted(cost) => cost,
        };
        let exchange = GemmExchange { collective, ranks, product: size, element_bytes: dtype.size() };
        let seconds = exchange.seconds(cost);
        if seconds.fused < seconds.sequential { OverlapPolicy::FUSED } else { OverlapPolicy::SEQUENTIAL }
    }

    /// Multiplications and additions of a rank.
    pub fn flops(&self) -> f64 {
        self.size.flops()
    }

    /// The Programs of all ranks, made ready on a machine: inputs `x` and `weight`, output `y`. What travels while it is computed is
    /// one group, as is what is not overlapped; else groups are those that are predicted to be fastest.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for sizes that make no layer; as [`Prepared::new`].
    pub fn prepare<M: Machine>(
        &self,
        machine: &M,
        policy: OverlapPolicy,
        config: WorldConfig,
    ) -> Result<Vec<PreparedOn<M>>, ExecError> {
        self.prepare_groups(machine, LayerGroups::Auto, policy, config)
    }

    /// As [`GemmCollectiveSpec::prepare`], in these groups where it is not to be one.
    ///
    /// # Errors
    /// As [`GemmCollectiveSpec::prepare`]; [`ExecError::Tensor`] for groups that do not add up.
    pub fn prepare_groups<M: Machine>(
        &self,
        machine: &M,
        groups: impl Into<LayerGroups>,
        policy: OverlapPolicy,
        config: WorldConfig,
    ) -> Result<Vec<PreparedOn<M>>, ExecError> {
        let groups = match policy.overlaps_by_groups() {
            true => groups.into(),
            false => WaveGroups::Fixed(1).into(),
        };
        let plan =
            self.plan(&groups, &CostModel::H200).map_err(|error| ExecError::tensor("the product", error))?;
        let group = Group::connect(machine, self.ranks, config)?;
        let prepared = group.prepare(|rank| lower_linear_forward(&plan, rank, policy), None);
        prepared.map_err(|error| group.fail_with(error))
    }
}

/// `sum over ranks of x W^T`, each rank's equal share of the rows on that rank: from every rank's `x` `[m, k]` and `W` `[n, k]` its
/// rows `[m / ranks, n]`. Results have the same bits under every `overlap`.
///
/// # Errors
/// [`ExecError::Tensor`] with the tensor that does not fit; whatever ends a run.
pub fn gemm_reduce_scatter<M: Machine>(
    machine: &M,
    x: &[HostTensor],
    weight: &[HostTensor],
    overlap: GemmOverlap<'_>,
    config: &WorldConfig,
) -> Result<Vec<HostTensor>, ExecError> {
    run(machine, GemmCollective::ReduceScatter, [x, weight], overlap, config)
}

/// As [`gemm_reduce_scatter`], with all rows `[m, n]` on every rank.
///
/// # Errors
/// As [`gemm_reduce_scatter`].
pub fn gemm_all_reduce<M: Machine>(
    machine: &M,
    x: &[HostTensor],
    weight: &[HostTensor],
    overlap: GemmOverlap<'_>,
    config: &WorldConfig,
) -> Result<Vec<HostTensor>, ExecError> {
    run(machine, GemmCollective::AllReduce, [x, weight], overlap, config)
}

/// `x W^T` of all ranks' rows: from every rank's `x` `[m / ranks, k]` and `W` `[n, k]` its product `[m, n]`. `overlap` as
/// in [`gemm_reduce_scatter`].
///
/// # Errors
/// As [`gemm_reduce_scatter`].
pub fn all_gather_gemm<M: Machine>(
    machine: &M,
    x: &[HostTensor],
    weight: &[HostTensor],
    overlap: GemmOverlap<'_>,
    config: &WorldConfig,
) -> Result<Vec<HostTensor>, ExecError> {
    run(machine, GemmCollective::AllGather, [x, weight], overlap, config)
}

fn run<M: Machine>(
    machine: &M,
    collective: GemmCollective,
    [x, weight]: [&[HostTensor]; 2],
    overlap: GemmOverlap<'_>,
    config: &WorldConfig,
) -> Result<Vec<HostTensor>, ExecError> {
    let ranks = x.len();
    let (Some(first_x), Some(first_weight)) = (x.first(), weight.first()) else {
        return Err(ExecError::tensor("x", TensorFault::NoRank));
    };
    if weight.len() != ranks {
        return Err(ExecError::tensor("weight", TensorFault::ForRanks { ranks: weight.len(), x: ranks }));
    }
    let (rows, n, k) = (x.iter().map(HostTensor::rows), first_weight.rows(), first_weight.row_elements());
    let m = match collective {
        GemmCollective::AllGather => rows.sum(),
        GemmCollective::ReduceScatter | GemmCollective::AllReduce => first_x.rows(),
    };
    let spec =
        GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, n, k }, dtype: first_x.dtype() };
    let mut prepared = spec.prepare(machine, spec.policy(overlap), config.clone())?;
    for (rank, prepared) in prepared.iter_mut().enumerate() {
        for (name, tensor) in [("x", &x[rank]), ("weight", &weight[rank])] {
            // Binding refuses what is not of the Program's shape and type.
            let buffer = prepared.backend().upload(name, tensor.clone())?;
            prepared.bind(name, buffer)?;
        }
    }
    Prepared::run_ranks(&mut prepared)?;
    let result = |prepared: &Prepared<M::Backend, M::Transport>| match prepared.buffer("y") {
        Some(buffer) => prepared.backend().download(buffer),
        None => Err(ExecError::tensor("y", TensorFault::NotAnOutput)),
    };
    prepared.iter().map(result).collect()
}
