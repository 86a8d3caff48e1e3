//! RMSNorm with a residual on the CPU.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::element::convert_element;
use crate::real::{Element, Real};

/// What [`rms_norm`](crate::rms_norm()) takes.
pub struct RmsNormArgs<'a, T> {
    /// Rows one after the other.
    pub src: Vec<&'a [T]>,
    /// Elements of a row.
    pub columns: usize,
    /// Added to `src` where it is given.
    pub residual: Option<&'a [T]>,
    /// Where what is normalised goes.
    pub sum: &'a mut [T],
    /// `[columns]`.
    pub weight: Option<&'a [T]>,
    /// What is added to the mean of squares.
    pub epsilon: f64,
    /// Where what has been normalised goes.
    pub out: &'a mut [T],
}

/// [`rms_norm`](crate::rms_norm()) of one element type.
pub(crate) fn rms_norm<T: Element>(args: RmsNormArgs<'_, T>, threads: &ThreadPool) {
    let RmsNormArgs { src, columns, residual, sum, weight, epsilon, out } = args;
    let rows: Vec<&[T]> = src.into_iter().flat_map(|piece| piece.chunks_exact(columns)).collect();
    let row_of_residual = |row: usize| residual.map(|residual| &residual[row * columns..(row + 1) * columns]);
    let added: Vec<Option<&[T]>> = (0..rows.len()).map(row_of_residual).collect();
    let (sum, out) = (sum.par_chunks_exact_mut(columns), out.par_chunks_exact_mut(columns));
    let all = rows.into_par_iter().zip(added).zip(sum).zip(out);
    threads.install(|| {
        all.for_each(|(((row, added), h), out)| {
            let element = |at: usize| -> T {
                let x: T::Accumulator = convert_element(row[at]);
                match added {
                    Some(added) => convert_element(x + convert_element::<T, T::Accumulator>(added[at])),
                    None => row[at],
                }
            };
            h.iter_mut().enumerate().for_each(|(at, h)| *h = element(at));
            let wide = |x: &T| convert_element::<T, T::Accumulator>(*x);
            let squares = h.iter().map(wide).fold(T::Accumulator::ZERO, |sum, x| sum + x * x);
            let mean = squares / convert_element::<f64, T::Accumulator>(columns as f64);
            let scale = T::Accumulator::ONE / (mean + convert_element(epsilon)).square_root();
            for (at, (out, x)) in out.iter_mut().zip(&*h).enumerate() {
                let normalised = wide(x) * scale;
                *out = convert_element(weight.map_or(normalised, |weight| normalised * wide(&weight[at])));
            }
        });
    });
}
