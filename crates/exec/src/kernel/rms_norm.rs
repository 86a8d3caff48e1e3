//! RMSNorm with a residual on the CPU.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{Element, Real};
use crate::host_element::convert_element;

/// What [`rms_norm`] takes.
pub(crate) struct RmsNormArgs<'a, T> {
    /// Rows one after the other.
    pub(crate) src: Vec<&'a [T]>,
    /// Elements of a row.
    pub(crate) columns: usize,
    /// Residual and its sum with the rows.
    pub(crate) residual: Option<(&'a [T], &'a mut [T])>,
    /// `[columns]`.
    pub(crate) weight: &'a [T],
    /// What is added to the mean of squares.
    pub(crate) epsilon: f64,
    pub(crate) out: &'a mut [T],
}

/// `h = src + residual`, rounded, and `out = h / sqrt(mean of h's squares + epsilon) weight`, row by row (Zhang and Sennrich, arXiv
/// 1910.07467). Calculated in the accumulator type, element after element, whatever the threads.
pub(crate) fn rms_norm<T: Element>(args: RmsNormArgs<'_, T>, threads: &ThreadPool) {
    let RmsNormArgs { src, columns, residual, weight, epsilon, out } = args;
    let rows: Vec<&[T]> = src.into_iter().flat_map(|piece| piece.chunks_exact(columns)).collect();
    let (residual, sum) = residual.unzip();
    let row_of_residual = |row: usize| residual.map(|residual| &residual[row * columns..(row + 1) * columns]);
    let added: Vec<Option<&[T]>> = (0..rows.len()).map(row_of_residual).collect();
    let mut sums: Vec<Option<&mut [T]>> = rows.iter().map(|_| None).collect();
    if let Some(sum) = sum {
        sums.iter_mut().zip(sum.chunks_exact_mut(columns)).for_each(|(slot, row)| *slot = Some(row));
    }
    let out = out.par_chunks_exact_mut(columns);
    let all = rows.into_par_iter().zip(added).zip(sums).zip(out);
    threads.install(|| {
        all.for_each(|(((row, added), sum), out)| {
            let element = |at: usize| -> T {
                let x: T::Accumulator = convert_element(row[at]);
                match added {
                    Some(added) => convert_element(x + convert_element::<T, T::Accumulator>(added[at])),
                    None => row[at],
                }
            };
            let h: Vec<T> = (0..columns).map(element).collect();
            let wide = |x: &T| convert_element::<T, T::Accumulator>(*x);
            let squares = h.iter().map(wide).fold(T::Accumulator::ZERO, |sum, x| sum + x * x);
            let mean = squares / convert_element::<f64, T::Accumulator>(columns as f64);
            let scale = T::Accumulator::ONE / (mean + convert_element(epsilon)).square_root();
            for ((out, x), weight) in out.iter_mut().zip(&h).zip(weight) {
                *out = convert_element(wide(x) * scale * wide(weight));
            }
            if let Some(sum) = sum {
                sum.copy_from_slice(&h);
            }
        });
    });
}
