//! How tensor parallelism shards a layer's tensors: cutting them for ranks, joining them again.

use counterpoint_mask::Range;
use counterpoint_plan::{Activations, LinearKind, LinearPlan};

use crate::with_host_element;
use crate::{ExecError, HostTensor, dispatch};

/// Tensors of one type, at least one, laid one after the other along the rows.
pub(crate) fn join_rows(parts: &[HostTensor]) -> HostTensor {
    let mut shape = parts[0].shape().to_vec();
    shape[0] = parts.iter().map(HostTensor::rows).sum();
    with_host_element!(parts[0].dtype(), T => {
        let elements = parts.iter().flat_map(|part| part.as_slice::<T>().unwrap_or(&[]));
        HostTensor::from_vec(shape, elements.copied().collect())
    })
}

/// How a tensor of a layer lies on its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shard {
    /// The tokens that a rank owns.
    Tokens,
    /// Equal ranges of rows.
    Rows,
    /// Equal ranges of columns.
    Columns,
    /// All of it on every rank.
    Whole,
}

impl Shard {
    /// Of `x` and `dx`.
    pub(super) fn of_input(plan: &LinearPlan) -> Self {
        if plan.spec.kind == LinearKind::Row { Self::Columns } else { Self::of_tokens(plan) }
    }

    /// Of `y` and `dy`.
    pub(super) fn of_output(plan: &LinearPlan) -> Self {
        if plan.spec.kind == LinearKind::Column { Self::Columns } else { Self::of_tokens(plan) }
    }

    fn of_tokens(plan: &LinearPlan) -> Self {
        match plan.spec.activations {
            Activations::Replicated => Self::Whole,
            Activations::SequenceParallel => Self::Tokens,
        }
    }

    /// Of the weight and its gradient.
    pub(super) fn of_weight(plan: &LinearPlan) -> Self {
        if plan.spec.kind == LinearKind::Column { Self::Rows } else { Self::Columns }
    }

    /// Of the bias and its gradient.
    pub(super) fn of_bias(plan: &LinearPlan) -> Self {
        if plan.spec.kind == LinearKind::Column { Self::Rows } else { Self::Whole }
    }

    /// Rows and columns of a rank's part of a tensor of so many.
    pub(super) fn window(self, plan: &LinearPlan, rank: usize, [rows, columns]: [usize; 2]) -> [Range; 2] {
        let own = |all: usize| {
            let some = all / plan.tp_size;
            Range::new(rank * some, (rank + 1) * some)
        };
        match self {
            Self::Whole => [Range::new(0, rows), Range::new(0, columns)],
            Self::Tokens => [plan.tokens_of(rank), Range::new(0, columns)],
            Self::Rows => [own(rows), Range::new(0, columns)],
            Self::Columns => [Range::new(0, rows), own(columns)],
        }
    }

    /// A rank's part of a whole tensor.
    pub(super) fn cut(
        self,
        plan: &LinearPlan,
        rank: usize,
        whole: &HostTensor,
    ) -> Result<HostTensor, ExecError> {
        match self {
            Self::Whole => Ok(whole.clone()),
            Self::Tokens | Self::Rows => {
                let [rows, _] = self.window(plan, rank, [whole.rows(), whole.row_elements()]);
                dispatch(whole, &[rows])
            }
            Self::Columns => {
                let all = whole.row_elements();
                let [_, some] = self.window(plan, rank, [whole.rows(), all]);
                let shape = vec![whole.rows(), some.len()];
                Ok(with_host_element!(whole.dtype(), T => {
                    let rows = whole.as_slice::<T>().unwrap_or(&[]).chunks_exact(all.max(1));
                    let elements = rows.flat_map(|row| &row[some.start..some.end]).copied();
                    HostTensor::from_vec(shape, elements.collect())
                }))
            }
        }
    }

    /// The whole tensor from the ranks' parts. Of those that every rank has, the first rank's.
    pub(super) fn join(self, parts: &[HostTensor]) -> HostTensor {
        let first = &parts[0];
        match self {
            Self::Whole => first.clone(),
            Self::Tokens | Self::Rows => join_rows(parts),
            Self::Columns => {
                let shape = vec![first.rows(), parts.iter().map(HostTensor::row_elements).sum()];
                with_host_element!(first.dtype(), T => {
                    let mut elements = Vec::with_capacity(shape.iter().product());
                    for row in 0..first.rows() {
                        for part in parts {
                            let columns = part.row_elements();
                            let of_part = part.as_slice::<T>().unwrap_or(&[]);
                            elements.extend_from_slice(&of_part[row * columns..(row + 1) * columns]);
                        }
                    }
                    HostTensor::from_vec(shape, elements)
                })
            }
        }
    }
}
