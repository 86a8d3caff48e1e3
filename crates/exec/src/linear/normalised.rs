//! Row-parallel layers with the RMSNorm behind them, on a group.

use std::ops::{Deref, DerefMut};

use counterpoint_plan::{LinearKind, LinearPlan, LinearSize};
use counterpoint_schedule::{
    NormSpec, OverlapPolicy, Timeline, lower_normalised_backward, lower_normalised_forward,
};

use super::layer::{LayerGradient, LinearLayer, RankBuffers, check_present, prepare_with};
use super::overlap::{PlannedPass, PlannedPasses};
use super::parallel::LinearOptions;
use crate::{Backend, ExecError, Group, HostTensor, Machine, Prepared, TensorFault};

/// A [`RowParallelLinear`](crate::RowParallelLinear) with the residual addition and the RMSNorm behind it, as between the blocks of a
/// transformer: `sum = x W^T + bias + residual`, and `y` is `sum` normalised row by row. Rows that were summed over ranks in groups, in
/// the order in which they travelled, come into their own in the pass that normalises them (FlashOverlap's reordering RMSNorm), so
/// that no pass of its own puts them together.
///
/// What this type adds comes on top of what a [`LinearLayer`] has, which it derefs to: tensors of
/// [`LinearTensor::Output`](crate::LinearTensor::Output) are `y`, `sum`, the residual and their gradients. Calls by
/// [`LinearLayer::enqueue`] name `residual`, `norm_weight`, `sum`, `dsum`, `dresidual` and
/// `dnorm_weight` too.
///
/// ```
/// use counterpoint_exec::{
///     Group, HostTensor, LinearOptions, LinearTensor, RowParallelLinearRmsNorm, WorldConfig,
/// };
/// use counterpoint_plan::{DType, LinearSize};
/// use counterpoint_schedule::NormSpec;
///
/// # fn main() -> Result<(), counterpoint_exec::ExecError> {
/// let group = Group::local(2, WorldConfig::default())?;
/// let (tokens, features, hidden) = (8, 6, 4);
/// let options = LinearOptions::new(DType::F32);
/// let norm = NormSpec { has_weight: false, ..NormSpec::new(0.0) };
/// let size = LinearSize { tokens, in_features: features, out_features: hidden };
/// let mut layer = RowParallelLinearRmsNorm::new(&group, size, &options, norm)?;
/// let filled = |rows, columns, value| HostTensor::from_vec(vec![rows, columns], vec![value; rows * columns]);
///
/// let weight = layer.scatter(LinearTensor::Weight, &filled(hidden, features, 0.5f32))?;
/// layer.bind_weight(&weight, None)?;
/// let x = layer.scatter(LinearTensor::Input, &filled(tokens, features, 1.0f32))?;
/// let residual = layer.scatter(LinearTensor::Output, &filled(tokens, hidden, 1.0f32))?;
/// let forward = layer.forward(&x, Some(&residual))?;
/// assert_eq!(layer.gather(LinearTensor::Output, &forward.sum)?, filled(tokens, hidden, 4.0f32));
/// assert_eq!(layer.gather(LinearTensor::Output, &forward.y)?, filled(tokens, hidden, 1.0f32));
/// # Ok(())
/// # }
/// ```
pub struct RowParallelLinearRmsNorm<M: Machine> {
    layer: LinearLayer<M>,
    norm: NormSpec,
}

/// What a forward gave. The next one writes over the memory of the results.
pub struct NormalisedForward<M: Machine> {
    /// Each rank's rows, normalised.
    pub y: RankBuffers<M>,
    /// What was normalised: the next residual, and what the backward needs.
    pub sum: RankBuffers<M>,
    /// Measured.
    pub timeline: Timeline,
}

/// What a backward gave. The next one writes over the memory of the results.
pub struct NormalisedBackward<M: Machine> {
    /// The gradient of `x`.
    pub dx: RankBuffers<M>,
    /// That of `sum`, and so of the residual.
    pub dresidual: RankBuffers<M>,
    /// That of the norm's weight, `[out_features]` in the type of sums, where there is one. Under sequence parallelism each rank's is of its own
    /// tokens, to be summed over the ranks with those of other such weights, as Megatron-LM does at the end of a step.
    pub dnorm_weight: Option<RankBuffers<M>>,
    /// Measured.
    pub timeline: Timeline,
}

impl<M: Machine> RowParallelLinearRmsNorm<M> {
    /// A layer of this size on ranks that share the input features, and the norm behind it.
    ///
    /// # Errors
    /// As [`RowParallelLinearRmsNorm::with_passes`]; [`ExecError::Tensor`] for sizes that are 0 or do not divide over the ranks.
    pub fn new(
        group: &Group<M>,
        size: LinearSize,
        options: &LinearOptions,
        norm: NormSpec,
    ) -> Result<Self, ExecError> {
        Self::with_passes(group, options.passes(group, LinearKind::Row, size)?, options.gradient, norm)
    }

    /// The same with a plan and a policy of its own for each pass.
    ///
    /// # Errors
    /// As [`LinearLayer::with_passes`]; [`ExecError::Tensor`] for column-parallel layers, gradients of the weight that are deferred, and an
    /// epsilon that is negative or no number.
    pub fn with_passes(
        group: &Group<M>,
        passes: PlannedPasses,
        gradient: LayerGradient,
        norm: NormSpec,
    ) -> Result<Self, ExecError> {
        let PlannedPasses { forward, backward: PlannedPass { plan, policy } } = passes;
        if let LayerGradient::Deferred { .. } = gradient {
            return Err(ExecError::tensor("dweight", TensorFault::DeferredBehindNorm));
        }
        check(&plan, norm)?;
        let of_backward = gradient.of_backward();
        let lower = |rank| lower_normalised_backward(&plan, rank, norm, of_backward, policy);
        let backward = prepare_with(group, &plan, policy, named(norm), lower)?;
        let mut normalised = Self::forward_only(group, forward.plan, forward.policy, norm)?;
        (normalised.layer.backward, normalised.layer.gradient) = (backward, gradient);
        Ok(normalised)
    }

    /// The same without a backward.
    ///
    /// # Errors
    /// As [`RowParallelLinearRmsNorm::with_passes`].
    pub fn forward_only(
        group: &Group<M>,
        plan: LinearPlan,
        policy: OverlapPolicy,
        norm: NormSpec,
    ) -> Result<Self, ExecError> {
        check(&plan, norm)?;
        let lower = |rank| lower_normalised_forward(&plan, rank, norm, policy);
        let forward = prepare_with(group, &plan, policy, named(norm), lower)?;
        let gradient = LayerGradient::Frozen;
        let layer = LinearLayer { forward, backward: Vec::new(), deferred: None, gradient, plan };
        Ok(Self { layer, norm })
    }

    /// The norm.
    pub fn norm(&self) -> NormSpec {
        self.norm
    }

    /// Uploads the norm's weight, `[out_features]`, for the ranks here: all have all of it.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when it has another shape; [`ExecError::OutOfMemory`].
    pub fn scatter_norm_weight(&self, whole: &HostTensor) -> Result<RankBuffers<M>, ExecError> {
        let wanted = [self.layer.plan.spec.out_features];
        if let Some(fault) = TensorFault::of_shape(&wanted, whole.shape()) {
            return Err(ExecError::tensor("norm_weight", fault));
        }
        let ranks = self.layer.forward.iter();
        ranks.map(|rank| rank.backend().upload("norm_weight", whole.clone())).collect()
    }

    /// Has the norm use this weight from the next pass on.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when a shape or type differs, or the norm has no weight.
    pub fn bind_norm_weight(&mut self, weight: &RankBuffers<M>) -> Result<(), ExecError> {
        check_present("norm_weight", true, self.norm.has_weight)?;
        self.layer.check_count("norm_weight", weight)?;
        Prepared::bind_ranks(&mut self.layer.forward, "norm_weight", weight)?;
        Prepared::bind_ranks(&mut self.layer.backward, "norm_weight", weight)
    }

    /// `y` and `sum` of `x` and, where the norm has one, the residual.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when a shape or type differs, a residual is missing or too much, or there is no weight yet; whatever ends a run
    /// early.
    pub fn forward(
        &mut self,
        x: &RankBuffers<M>,
        residual: Option<&RankBuffers<M>>,
    ) -> Result<NormalisedForward<M>, ExecError> {
        check_present("residual", residual.is_some(), self.norm.has_residual)?;
        if let Some(residual) = residual {
            self.layer.check_count("residual", residual)?;
            Prepared::bind_ranks(&mut self.layer.forward, "residual", residual)?;
        }
        let pass = self.layer.forward(x)?;
        let sum = Prepared::buffers_of(&self.layer.forward, "sum")?;
        Ok(NormalisedForward { y: pass.result, sum, timeline: pass.timeline })
    }

    /// The gradients: `x` and `sum` are those of the forward, `dy` the gradient of its `y`, and `dsum`, where the norm has a residual, what else
    /// reaches `sum`, such as the gradient of the next residual.
    ///
    /// # Errors
    /// As [`RowParallelLinearRmsNorm::forward`]; [`ExecError::Tensor`] for a layer that was made for the forward only.
    pub fn backward(
        &mut self,
        x: &RankBuffers<M>,
        sum: &RankBuffers<M>,
        dy: &RankBuffers<M>,
        dsum: Option<&RankBuffers<M>>,
    ) -> Result<NormalisedBackward<M>, ExecError> {
        check_present("dsum", dsum.is_some(), self.norm.has_residual)?;
        for (name, buffers) in [("sum", Some(sum)), ("dsum", dsum)] {
            let Some(buffers) = buffers else { continue };
            self.layer.check_count(name, buffers)?;
            Prepared::bind_ranks(&mut self.layer.backward, name, buffers)?;
        }
        let pass = self.layer.backward(x, dy)?;
        let ranks = &self.layer.backward;
        Ok(NormalisedBackward {
            dx: pass.result,
            dresidual: Prepared::buffers_of(ranks, "dresidual")?,
            dnorm_weight: self
                .norm
                .has_weight
                .then(|| Prepared::buffers_of(ranks, "dnorm_weight"))
                .transpose()?,
            timeline: pass.timeline,
        })
    }
}

impl<M: Machine> Deref for RowParallelLinearRmsNorm<M> {
    type Target = LinearLayer<M>;

    fn deref(&self) -> &LinearLayer<M> {
        &self.layer
    }
}

impl<M: Machine> DerefMut for RowParallelLinearRmsNorm<M> {
    fn deref_mut(&mut self) -> &mut LinearLayer<M> {
        &mut self.layer
    }
}

/// What ranks must have alike of it.
fn named(norm: NormSpec) -> Option<(&'static str, String)> {
    Some(("norm", format!("{norm:?}")))
}

fn check(plan: &LinearPlan, norm: NormSpec) -> Result<(), ExecError> {
    if plan.spec.kind != LinearKind::Row {
        return Err(ExecError::tensor("layer", TensorFault::NotRowParallel));
    }
    if !(norm.epsilon >= 0.0 && norm.epsilon.is_finite()) {
        return Err(ExecError::tensor("epsilon", TensorFault::Negative { value: norm.epsilon }));
    }
    Ok(())
}
