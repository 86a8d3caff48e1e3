//! The gradients of RMSNorm on the CPU.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::element::convert_element;
use crate::real::{Element, Real};

/// What [`rms_norm_backward`](crate::rms_norm_backward()) takes. Rows lie one after the other.
pub struct RmsNormBackwardArgs<'a, T: Element> {
    /// The gradient of what the forward left.
    pub dout: &'a [T],
    /// What was normalised.
    pub sum: &'a [T],
    /// Elements of a row.
    pub columns: usize,
    /// `[columns]`, and where its gradient goes.
    pub weight: Option<(&'a [T], &'a mut [T::Accumulator])>,
    /// What is added to the gradient of `sum`.
    pub dsum: Option<&'a [T]>,
    /// What was added to the mean of squares.
    pub epsilon: f64,
    /// The gradient of `sum`.
    pub dh: &'a mut [T],
}

/// Columns whose sums one thread forms.
const COLUMNS: usize = 64;

/// [`rms_norm_backward`](crate::rms_norm_backward()) of one element type.
pub(crate) fn rms_norm_backward<T: Element>(args: RmsNormBackwardArgs<'_, T>, threads: &ThreadPool) {
    let RmsNormBackwardArgs { dout, sum, columns, weight, dsum, epsilon, dh } = args;
    let wide = |x: &T| convert_element::<T, T::Accumulator>(*x);
    let count = convert_element::<f64, T::Accumulator>(columns as f64);
    let (weight, dweight) = weight.unzip();
    let gradient = |dout: &T, at: usize| match weight {
        Some(weight) => wide(dout) * wide(&weight[at]),
        None => wide(dout),
    };
    threads.install(|| {
        let rows = sum.par_chunks_exact(columns).zip(dout.par_chunks_exact(columns));
        let scale = |h: &[T]| {
            let squares = h.iter().map(wide).fold(T::Accumulator::ZERO, |sum, x| sum + x * x);
            T::Accumulator::ONE / (squares / count + convert_element(epsilon)).square_root()
        };
        let scales: Vec<T::Accumulator> = rows.clone().map(|(h, _)| scale(h)).collect();
        let all = rows.zip(&scales).zip(dh.par_chunks_exact_mut(columns)).enumerate();
        all.for_each(|(row, (((h, dout), &scale), dh))| {
            let both = h.iter().zip(dout).enumerate();
            let along =
                both.fold(T::Accumulator::ZERO, |sum, (at, (h, dout))| sum + gradient(dout, at) * wide(h));
            let along = along / count * scale * scale;
            for (at, ((dh, h), dout)) in dh.iter_mut().zip(h).zip(dout).enumerate() {
                let own = scale * (gradient(dout, at) - wide(h) * along);
                let other = dsum.map_or(T::Accumulator::ZERO, |dsum| wide(&dsum[row * columns + at]));
                *dh = convert_element(own + other);
            }
        });
        let Some(dweight) = dweight else { return };
        dweight.par_chunks_mut(COLUMNS).enumerate().for_each(|(chunk, sums)| {
            sums.fill(T::Accumulator::ZERO);
            for (row, &scale) in scales.iter().enumerate() {
                let first = row * columns + chunk * COLUMNS;
                let (h, dout) = (&sum[first..first + sums.len()], &dout[first..first + sums.len()]);
                for ((sum, h), dout) in sums.iter_mut().zip(h).zip(dout) {
                    *sum += wide(dout) * wide(h) * scale;
                }
            }
        });
    });
}
