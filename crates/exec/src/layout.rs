//! Tensors of a whole sequence to tensors of ranks and back.

use counterpoint_mask::Range;
use counterpoint_plan::Dispatch;

use crate::with_host_element;
use crate::{ExecError, HostTensor, TensorFault};

/// The rows of `ranges`, one after the other.
///
/// # Errors
/// [`ExecError::Tensor`] when a range reaches past the tensor.
pub fn dispatch(tensor: &HostTensor, ranges: &[Range]) -> Result<HostTensor, ExecError> {
    if let Some(range) = ranges.iter().find(|range| range.end > tensor.rows()) {
        let fault = TensorFault::RowsBeyond { start: range.start, end: range.end, rows: tensor.rows() };
        return Err(ExecError::tensor("to dispatch", fault));
    }
    let row = tensor.row_elements();
    let mut shape = tensor.shape().to_vec();
    shape[0] = ranges.iter().map(Range::len).sum();
    Ok(with_host_element!(tensor.dtype(), T => {
        let elements = tensor.as_slice::<T>().unwrap_or(&[]);
        let mut out = Vec::with_capacity(shape.iter().product());
        ranges.iter().for_each(|range| out.extend_from_slice(&elements[range.start * row..range.end * row]));
        HostTensor::from_vec(shape, out)
    }))
}

/// The inverse of dispatching by `dispatch`: every rank's local rows in the order of the whole sequence.
///
/// # Errors
/// [`ExecError::Tensor`] when there is not one tensor a rank, or they do not have the rows that the ranks own, or differ in
/// row shape or element type.
pub fn undispatch(dispatch: &Dispatch, locals: &[HostTensor]) -> Result<HostTensor, ExecError> {
    let error = |rank: usize, fault: TensorFault| ExecError::tensor(&format!("of rank {rank}"), fault);
    let ranks = dispatch.cp_size();
    let Some(first) = locals.first().filter(|_| locals.len() == ranks) else {
        return Err(error(0, TensorFault::NotOneForEach { given: locals.len(), ranks }));
    };
    let mut shape = first.shape().to_vec();
    shape[0] = dispatch.seqlen();
    let mut whole = HostTensor::zeros(shape, first.dtype());
    for (rank, local) in locals.iter().enumerate() {
        if local.shape()[1..] != first.shape()[1..] || local.dtype() != first.dtype() {
            let fault = TensorFault::UnlikeFirst {
                dtype: local.dtype(),
                shape: local.shape().to_vec(),
                first_dtype: first.dtype(),
                first_shape: first.shape().to_vec(),
            };
            return Err(error(rank, fault));
        }
        let owned = dispatch.tokens(rank);
        if local.rows() != owned {
            return Err(error(rank, TensorFault::OwnedRows { rows: local.rows(), owned }));
        }
        scatter(local, &dispatch.ranges(rank), &mut whole);
    }
    Ok(whole)
}

/// Writes a rank's local rows to their places.
fn scatter(local: &HostTensor, ranges: &[Range], whole: &mut HostTensor) {
    let row = whole.row_elements();
    with_host_element!(whole.dtype(), T => {
        let (Some(local), Some(whole)) = (local.as_slice::<T>(), whole.as_mut_slice::<T>()) else { return };
        let mut start = 0;
        for range in ranges {
            let end = start + range.len() * row;
            whole[range.start * row..range.end * row].copy_from_slice(&local[start..end]);
            start = end;
        }
    });
}
