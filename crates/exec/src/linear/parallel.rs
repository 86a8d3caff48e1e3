//! Column- and row-parallel layers.

use std::ops::{Deref, DerefMut};

use counterpoint_plan::{Activations, DType, LinearKind, LinearSize, LinearSpec};

use super::layer::{LayerGradient, LinearLayer};
use super::overlap::{LayerOverlap, PlannedPasses};
use crate::{ExecError, Group, Machine};

/// What a tensor-parallel layer is besides its sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearOptions {
    /// How activations that are not split by features lie.
    pub activations: Activations,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// Type of activations, weight and bias.
    pub dtype: DType,
    /// What becomes of the gradient of the weight.
    pub gradient: LayerGradient,
    /// How communication is brought to run under computation.
    pub overlap: LayerOverlap,
}

impl LinearOptions {
    /// Sequence parallelism, no bias, gradients of the weight added to f32, each pass overlapped as is predicted to be fastest.
    pub fn new(dtype: DType) -> Self {
        Self {
            activations: Activations::SequenceParallel,
            has_bias: false,
            dtype,
            gradient: LayerGradient::Accumulated(dtype.accumulator()),
            overlap: LayerOverlap::default(),
        }
    }

    fn layer<M: Machine>(
        &self,
        group: &Group<M>,
        kind: LinearKind,
        size: LinearSize,
    ) -> Result<LinearLayer<M>, ExecError> {
        LinearLayer::with_passes(group, self.passes(group, kind, size)?, self.gradient)
    }

    /// The passes of a layer of this size.
    pub(super) fn passes<M: Machine>(
        &self,
        group: &Group<M>,
        kind: LinearKind,
        LinearSize { tokens, in_features, out_features }: LinearSize,
    ) -> Result<PlannedPasses, ExecError> {
        let Self { activations, has_bias, dtype, gradient, ref overlap } = *self;
        let spec = LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype };
        overlap.passes(group.linear(), spec, gradient).map_err(|error| ExecError::tensor("layer", error))
    }
}

/// A linear layer whose output features are split over the ranks: `y = x W^T + bias`, of which every rank has some columns
/// (Megatron-LM, section 3).
///
/// Under sequence parallelism a rank has its own tokens of `x`. The forward multiplies those while the others' travel, group by
/// group; the backward gathers `x` again under the product of `dx`, whose sums travel inside it and under the gradient of the
/// weight. Otherwise all ranks have all of `x`, and the sums of `dx` are all-reduced.
///
/// ```
/// use counterpoint_exec::{
///     ColumnParallelLinear, Group, HostTensor, LinearOptions, LinearTensor, WorldConfig,
/// };
/// use counterpoint_plan::{DType, LinearSize};
///
/// # fn main() -> Result<(), counterpoint_exec::ExecError> {
/// let group = Group::local(2, WorldConfig::default())?;
/// let (tokens, features, hidden) = (8, 4, 6);
/// let options = LinearOptions::new(DType::F32);
/// let size = LinearSize { tokens, in_features: features, out_features: hidden };
/// let mut layer = ColumnParallelLinear::new(&group, size, &options)?;
/// let filled = |rows, columns, value| HostTensor::from_vec(vec![rows, columns], vec![value; rows * columns]);
///
/// let weight = layer.scatter(LinearTensor::Weight, &filled(hidden, features, 0.5f32))?;
/// let main_grad = layer.scatter(LinearTensor::Weight, &filled(hidden, features, 0.0f32))?;
/// layer.bind_weight(&weight, None)?;
/// layer.bind_main_grad(&main_grad, None)?;
///
/// let x = layer.scatter(LinearTensor::Input, &filled(tokens, features, 1.0f32))?;
/// let dy = layer.scatter(LinearTensor::Output, &filled(tokens, hidden, 1.0f32))?;
/// let y = layer.forward(&x)?.result;
/// assert_eq!(layer.gather(LinearTensor::Output, &y)?, filled(tokens, hidden, 2.0f32));
/// // Two backwards, of two micro-batches say, add up.
/// for _ in 0..2 {
///     let dx = layer.backward(&x, &dy)?.result;
///     assert_eq!(layer.gather(LinearTensor::Input, &dx)?, filled(tokens, features, 3.0f32));
/// }
/// assert_eq!(layer.gather(LinearTensor::Weight, &main_grad)?, filled(hidden, features, 16.0f32));
/// # Ok(())
/// # }
/// ```
pub struct ColumnParallelLinear<M: Machine>(LinearLayer<M>);

/// A linear layer whose input features are split over the ranks: each has a partial sum of every `y`, and partial sums are summed over the
/// ranks, group by group, while the next group is multiplied. `x` is what a [`ColumnParallelLinear`] before it gives.
///
/// Under sequence parallelism a rank ends with its own tokens of `y`, otherwise all ranks with all of them.
pub struct RowParallelLinear<M: Machine>(LinearLayer<M>);

macro_rules! parallel {
    ($name:ident, $kind:expr, $split:literal) => {
        impl<M: Machine> $name<M> {
            #[doc = concat!(
                                        "A layer of this size over the ranks of a group, which share the ",
                                        $split,
                                        " features."
                                    )]
            ///
            /// # Errors
            /// As [`LinearLayer::new`]; [`ExecError::Tensor`] for sizes that are 0 or do not divide over the ranks.
            pub fn new(
                group: &Group<M>,
                size: LinearSize,
                options: &LinearOptions,
            ) -> Result<Self, ExecError> {
                options.layer(group, $kind, size).map(Self)
            }
        }

        impl<M: Machine> Deref for $name<M> {
            type Target = LinearLayer<M>;

            fn deref(&self) -> &LinearLayer<M> {
                &self.0
            }
        }

        impl<M: Machine> DerefMut for $name<M> {
            fn deref_mut(&mut self) -> &mut LinearLayer<M> {
                &mut self.0
            }
        }
    };
}
parallel!(ColumnParallelLinear, LinearKind::Column, "output");
parallel!(RowParallelLinear, LinearKind::Row, "input");
