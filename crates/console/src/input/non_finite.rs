//! Finds the NaN or infinity in a tensor that was read, with its place in the file.

use std::path::Path;

use counterpoint_exec::{HostData, HostTensor};
use counterpoint_mask::Range;

use crate::error::CliError;

/// Refuses rows of a tensor that hold NaN or infinity, naming the first. `path` is the file that they come from, `ranges` are
/// their places in it.
pub fn refuse_non_finite(
    path: &Path,
    name: &'static str,
    tensor: &HostTensor,
    ranges: &[Range],
) -> Result<(), CliError> {
    let found = match tensor.data() {
        HostData::F64(values) => first(values, |&x| x),
        HostData::F32(values) => first(values, |&x| f64::from(x)),
        HostData::Bf16(values) => first(values, |&x| f64::from(x)),
        HostData::F16(values) => first(values, |&x| f64::from(x)),
    };
    match found {
        None => Ok(()),
        Some((at, value)) => Err(CliError::NonFinite {
            path: path.to_owned(),
            name,
            value,
            index: {
                let mut index = unravel(at, tensor.shape());
                index[0] = row_in_file(index[0], ranges);
                index
            },
        }),
    }
}

fn first<T>(values: &[T], widen: impl Fn(&T) -> f64) -> Option<(usize, f64)> {
    let found = values.iter().map(widen).enumerate();
    found.into_iter().find(|(_, value)| !value.is_finite())
}

/// Position `at` of a row-major tensor as one index an axis.
fn unravel(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (position, &length) in index.iter_mut().zip(shape).rev() {
        *position = at % length;
        at /= length;
    }
    index
}

/// Where row `row` of those of `ranges` is.
fn row_in_file(mut row: usize, ranges: &[Range]) -> usize {
    for range in ranges {
        if row < range.len() {
            return range.start + row;
        }
        row -= range.len();
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_first() {
        let path = Path::new("in.st");
        let mut values = vec![1.0f32; 2 * 3 * 4];
        values[17] = f32::NEG_INFINITY;
        values[20] = f32::NAN;
        let tensor = HostTensor::new(vec![2, 3, 4], HostData::F32(values));
        let error = refuse_non_finite(path, "k", &tensor, &[Range::new(0, 2)]).unwrap_err().to_string();
        assert!(error.contains("in.st: tensor `k` holds -inf at [1, 1, 1]"), "{error}");
        let apart = [Range::new(4, 5), Range::new(90, 91)];
        let error = refuse_non_finite(path, "k", &tensor, &apart).unwrap_err().to_string();
        assert!(error.contains("at [90, 1, 1]"), "{error}");
        let half = HostTensor::new(vec![1, 2], HostData::F16(vec![half::f16::MAX, half::f16::NAN]));
        let error = refuse_non_finite(path, "q", &half, &[Range::new(0, 1)]).unwrap_err().to_string();
        assert!(error.contains("NaN at [0, 1]"), "{error}");
        let empty = HostTensor::new(vec![0, 1, 1], HostData::F64(vec![]));
        assert!(refuse_non_finite(path, "v", &empty, &[]).is_ok());
    }
}
