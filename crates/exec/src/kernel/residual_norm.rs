use rayon::ThreadPool;
use rayon::prelude::*;

use super::Element;

/// Tensors of [`residual_norm`].
pub(crate) struct ResidualNormArgs<'a, T: Element> {
    /// `[rows, columns]`
    pub src: &'a [T],
    /// `[rows, columns]`
    pub residual: &'a [T],
    /// `[columns]`
    pub weight: &'a [T],
    /// Added to the mean of squares.
    pub epsilon: f64,
    /// `[rows, columns]`, written: `src + residual`.
    pub sum: &'a mut [T],
    /// `[rows, columns]`, written.
    pub dst: &'a mut [T],
}

/// `sum = src + residual`, rounded; `dst = sum / sqrt(mean(sum^2) + epsilon) * weight`, row by row, from what was rounded.
///
/// # Panics
/// When the shapes do not fit.
pub(crate) fn residual_norm<T: Element>(args: ResidualNormArgs<'_, T>, threads: &ThreadPool) {
    let ResidualNormArgs { src, residual, weight, epsilon, sum, dst } = args;
    let columns = weight.len();
    assert!(src.len() == residual.len() && src.len() == sum.len() && src.len() == dst.len());
    let row = |src: &[T], residual: &[T], sum: &mut [T], dst: &mut [T]| {
        let mut squares = 0.0;
        for ((sum, a), b) in sum.iter_mut().zip(src).zip(residual) {
            *sum = T::narrow(a.widen() + b.widen());
            squares += sum.to_f64() * sum.to_f64();
        }
        let scale = 1.0 / (squares / columns as f64 + epsilon).sqrt();
        for ((dst, sum), weight) in dst.iter_mut().zip(sum.iter()).zip(weight) {
            *dst = T::from_f64(sum.to_f64() * scale * weight.to_f64());
        }
    };
    threads.install(|| {
        let sources = src.par_chunks_exact(columns).zip(residual.par_chunks_exact(columns));
        let results = sources.zip(sum.par_chunks_exact_mut(columns)).zip(dst.par_chunks_exact_mut(columns));
        results.with_min_len(8).for_each(|(((src, residual), sum), dst)| row(src, residual, sum, dst));
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn rows_have_unit_mean_square_before_the_weight() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let src = [3.0f32, 4.0, 0.0, 0.0, 1.0, 1.0].map(bf16::from_f32);
        let residual = [0.0f32, 0.0, 0.0, 0.0, 1.0, -1.0].map(bf16::from_f32);
        let weight = [2.0f32, 1.0].map(bf16::from_f32);
        let (mut sum, mut dst) = ([bf16::ZERO; 6], [bf16::ZERO; 6]);
        let args = ResidualNormArgs {
            src: &src,
            residual: &residual,
            weight: &weight,
            epsilon: 0.0,
            sum: &mut sum,
            dst: &mut dst,
        };
        residual_norm(args, &threads);
        assert_eq!(sum.map(f32::from), [3.0, 4.0, 0.0, 0.0, 2.0, 0.0]);
        let root = 12.5f64.sqrt();
        let wanted = [6.0 / root, 4.0 / root, f64::NAN, f64::NAN, 2.0 * 2f64.sqrt(), 0.0].map(bf16::from_f64);
        for (found, wanted) in dst.iter().zip(wanted) {
            assert!(*found == wanted || (found.is_nan() && wanted.is_nan()), "{found} {wanted}");
        }
    }
}
