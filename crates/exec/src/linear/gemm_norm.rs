use counterpoint_schedule::{OverlapPolicy, lower_row_norm_forward};

use super::gemm_collective::{bind, output, refused};
use super::{GemmCollective, GemmCollectiveSpec, GemmOverlap, PreparedOn};
use crate::{ExecError, HostTensor, Machine, Prepared, WorldConfig};

/// What follows a reduce-scatter in a transformer's layer.
#[derive(Clone, Copy, Debug)]
pub struct NormInputs<'a> {
    /// Every rank's rows of the residual, `[m / ranks, n]`.
    pub residual: &'a [HostTensor],
    /// The weight of the norm, `[n]`.
    pub weight: &'a HostTensor,
    /// Added to the mean of squares.
    pub epsilon: f64,
}

/// A rank's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct NormedRows {
    /// `[m / ranks, n]`: the norm of the sums.
    pub normed: HostTensor,
    /// `[m / ranks, n]`: the sums over ranks and the residual, which is the next residual.
    pub sum: HostTensor,
}

impl GemmCollectiveSpec {
    /// As [`GemmCollectiveSpec::prepare`], of a reduce-scatter or an all-reduce with a residual and a norm behind it: inputs `residual`
    /// and `norm_weight` too, outputs `y` and `sum`, and `product`, what is there before them.
    ///
    /// # Errors
    /// As [`GemmCollectiveSpec::prepare`]; [`ExecError::Tensor`] for an all-gather, after which no rank has whole rows.
    pub fn prepare_norm<M: Machine>(
        &self,
        machine: &M,
        policy: OverlapPolicy,
        config: WorldConfig,
        epsilon: f64,
    ) -> Result<Vec<PreparedOn<M>>, ExecError> {
        if self.collective == GemmCollective::AllGather {
            return Err(refused("y", "has columns of all ranks, and a norm is of whole rows".to_owned()));
        }
        let lower = |plan: &_, rank| lower_row_norm_forward(plan, rank, policy, epsilon);
        self.prepare_as(machine, policy, config, lower)
    }
}

/// [`gemm_reduce_scatter`](crate::gemm_reduce_scatter) with a residual added to each rank's rows and their root mean square norm
/// behind it ([`ResidualNorm`](counterpoint_schedule::ResidualNorm)), as one Program: rows do not leave the device between.
///
/// # Errors
/// [`ExecError::Tensor`] with the tensor that does not fit; whatever ends a run.
pub fn gemm_reduce_scatter_norm<M: Machine>(
    machine: &M,
    x: &[HostTensor],
    weight: &[HostTensor],
    norm: NormInputs<'_>,
    overlap: GemmOverlap<'_>,
    config: &WorldConfig,
) -> Result<Vec<NormedRows>, ExecError> {
    let spec = GemmCollectiveSpec::of_tensors(GemmCollective::ReduceScatter, x, weight)?;
    let NormInputs { residual, weight: norm_weight, epsilon } = norm;
    if residual.len() != spec.ranks {
        let reason = format!("is there for {} ranks, x for {}", residual.len(), spec.ranks);
        return Err(refused("residual", reason));
    }
    let mut prepared = spec.prepare_norm(machine, spec.policy(overlap), config.clone(), epsilon)?;
    for (rank, prepared) in prepared.iter_mut().enumerate() {
        let tensors = [("x", &x[rank]), ("weight", &weight[rank]), ("residual", &residual[rank])];
        bind(prepared, &tensors)?;
        bind(prepared, &[("norm_weight", norm_weight)])?;
    }
    Prepared::run_ranks(&mut prepared)?;
    let rows =
        |prepared| Ok(NormedRows { normed: output::<M>(prepared, "y")?, sum: output::<M>(prepared, "sum")? });
    prepared.iter().map(rows).collect()
}
