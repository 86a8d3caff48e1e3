//! RMSNorm and its gradients by their definition in f64, and the comparison of results with it.

use counterpoint_exec::HostTensor;
use counterpoint_mask::Range;
use counterpoint_plan::DType;

use crate::WrongResult;
use crate::linear::{LinearSample, half_unit};

/// What was normalised, and how.
#[derive(Clone, Copy, Debug)]
pub struct NormalisedRows<'a> {
    /// The rows as they are stored, `[rows, columns]`.
    pub sum: &'a HostTensor,
    /// `[columns]`; without one it is 1.
    pub weight: Option<&'a HostTensor>,
    /// What was added to the mean of squares.
    pub epsilon: f64,
}

/// Gradients of an RMSNorm: what goes in and what has come out.
#[derive(Clone, Copy, Debug)]
pub struct NormGradients<'a> {
    /// The gradient of what came out of the norm, `[rows, columns]`.
    pub dout: &'a HostTensor,
    /// What else goes into the gradient of the rows, `[rows, columns]`.
    pub dsum: Option<&'a HostTensor>,
    /// That gradient, `[rows, columns]`.
    pub dh: &'a HostTensor,
    /// That of the weight, `[columns]` in the type of sums.
    pub dweight: Option<&'a HostTensor>,
}

/// The largest share that an element has had of its bound, and the bounds of a type.
struct Judge {
    dtype: DType,
    worst: f64,
}

impl Judge {
    /// One element: it is rounded to `stored`, and is a sum of so many terms whose sizes add up to `size`.
    fn element(
        &mut self,
        (name, index): (&str, &[usize]),
        [found, right, size]: [f64; 3],
        terms: usize,
        stored: DType,
    ) -> Result<(), WrongResult> {
        let summed = (2 * terms + 16) as f64 * half_unit(self.dtype.accumulator());
        let bound = 2.0 * half_unit(stored) * right.abs() + summed * size + smallest(stored);
        let share = (found - right).abs() / bound;
        // Not a number is not within its bound.
        if share <= 1.0 {
            self.worst = self.worst.max(share);
            return Ok(());
        }
        let (name, index) = (name.to_owned(), index.to_vec());
        Err(WrongResult::NormElement { name, index, found, right, bound })
    }
}

/// Below it numbers of the type lie as far apart as there.
fn smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-24),
        DType::Bf16 | DType::F32 => 2f64.powi(-126),
        DType::F64 => f64::MIN_POSITIVE,
    }
}

/// The rows of a tensor in f64.
struct Rows {
    values: Vec<f64>,
    columns: usize,
}

impl Rows {
    fn of(tensor: &HostTensor) -> Self {
        Self { values: tensor.to_f64(), columns: tensor.row_elements() }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }
}

impl NormalisedRows<'_> {
    fn weights(&self) -> Vec<f64> {
        self.weight.map_or_else(|| vec![1.0; self.sum.row_elements()], HostTensor::to_f64)
    }

    fn scale(&self, h: &[f64]) -> f64 {
        (h.iter().map(|h| h * h).sum::<f64>() / h.len() as f64 + self.epsilon).sqrt().recip()
    }
}

/// Compares the rows of `y` with `sum` normalised: the largest share that an element has of what it may err, 1 at most.
///
/// # Errors
/// The first element that is out of its bound.
pub fn check_rms_norm(
    norm: &NormalisedRows<'_>,
    y: &HostTensor,
    sample: LinearSample,
) -> Result<f64, WrongResult> {
    let (sum, found, weights) = (Rows::of(norm.sum), Rows::of(y), norm.weights());
    let mut judge = Judge { dtype: y.dtype(), worst: 0.0 };
    for row in sample.of(Range::new(0, norm.sum.rows())) {
        let h = sum.row(row);
        let scale = norm.scale(h);
        for (at, (found, h)) in found.row(row).iter().zip(h).enumerate() {
            let right = h * scale * weights[at];
            judge.element(("y", &[row, at]), [*found, right, right.abs()], sum.columns, y.dtype())?;
        }
    }
    Ok(judge.worst)
}

/// Likewise of the gradients; that of the weight is compared whole.
///
/// # Errors
/// As [`check_rms_norm`].
pub fn check_rms_norm_backward(
    norm: &NormalisedRows<'_>,
    gradients: &NormGradients<'_>,
    sample: LinearSample,
) -> Result<f64, WrongResult> {
    let NormGradients { dout, dsum, dh, dweight } = gradients;
    let (sum, dout, found, weights) = (Rows::of(norm.sum), Rows::of(dout), Rows::of(dh), norm.weights());
    let (dsum, rows, columns) = (dsum.map(Rows::of), norm.sum.rows(), sum.columns);
    let sampled = sample.of(Range::new(0, rows));
    let mut judge = Judge { dtype: dh.dtype(), worst: 0.0 };
    let (mut sums, mut sizes) = (vec![0.0; columns], vec![0.0; columns]);
    for row in 0..rows {
        let (h, dout) = (sum.row(row), dout.row(row));
        let scale = norm.scale(h);
        for at in 0..columns {
            sums[at] += dout[at] * h[at] * scale;
            sizes[at] += (dout[at] * h[at] * scale).abs();
        }
        if sampled.binary_search(&row).is_err() {
            continue;
        }
        let term = |at: usize| dout[at] * weights[at] * h[at] * scale / columns as f64;
        let along: f64 = (0..columns).map(term).sum();
        let size: f64 = (0..columns).map(|at| term(at).abs()).sum();
        for at in 0..columns {
            let (own, normalised) = (dout[at] * weights[at], h[at] * scale);
            let other = dsum.as_ref().map_or(0.0, |dsum| dsum.row(row)[at]);
            let right = scale * (own - normalised * along) + other;
            let size = scale * (own.abs() + normalised.abs() * size) + other.abs();
            judge.element(("dh", &[row, at]), [found.row(row)[at], right, size], columns, dh.dtype())?;
        }
    }
    let Some(dweight) = dweight else { return Ok(judge.worst) };
    for (at, found) in dweight.to_f64().into_iter().enumerate() {
        judge.element(("dweight", &[at]), [found, sums[at], sizes[at]], rows + columns, dweight.dtype())?;
    }
    Ok(judge.worst)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: [f64; 4]) -> HostTensor {
        HostTensor::from_vec(vec![2, 2], values.to_vec())
    }

    /// Two rows of two columns whose norm is known: 3 and 4 have the root mean square 3.5355.
    #[test]
    fn what_is_wrong_is_found() {
        let (sum, weight) = (tensor([3.0, 4.0, 0.0, 0.0]), HostTensor::from_vec(vec![2], vec![1.0, 2.0]));
        let norm = NormalisedRows { sum: &sum, weight: Some(&weight), epsilon: 0.5 };
        let scale = 1.0 / 13f64.sqrt();
        let check = |y: [f64; 4]| check_rms_norm(&norm, &tensor(y), LinearSample::Whole);
        assert!(check([3.0 * scale, 8.0 * scale, 0.0, 0.0]).unwrap() < 0.1);
        assert!(check([8.0 * scale, 3.0 * scale, 0.0, 0.0]).unwrap_err().to_string().starts_with("y[0, 0]"));
        assert!(
            check([3.0 * scale, 8.0 * scale, 0.0, f64::NAN]).unwrap_err().to_string().starts_with("y[1, 1]")
        );

        // dout is 1 in the first column: g = (1, 0), and the mean of g h is 1.5.
        let dout = tensor([1.0, 0.0, 1.0, 0.0]);
        let along = 1.5 * scale * scale;
        let right = [scale * (1.0 - 3.0 * along), -scale * 4.0 * along, 2f64.sqrt(), 0.0];
        let check = |dh: [f64; 4], dweight: [f64; 2], dsum: Option<&HostTensor>| {
            let (dh, dweight) = (tensor(dh), HostTensor::from_vec(vec![2], dweight.to_vec()));
            let gradients = NormGradients { dout: &dout, dsum, dh: &dh, dweight: Some(&dweight) };
            check_rms_norm_backward(&norm, &gradients, LinearSample::Whole)
        };
        let dweight = [3.0 * scale, 0.0];
        assert!(check(right, dweight, None).unwrap() < 0.5);
        assert!(check(right, dweight, Some(&dout)).unwrap_err().to_string().starts_with("dh[0, 0]"));
        assert!(check(right, [0.0, 0.0], None).unwrap_err().to_string().starts_with("dweight[0]"));
    }
}
