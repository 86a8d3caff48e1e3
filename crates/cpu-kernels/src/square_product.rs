//! The matrix product alone, by whose speed the CPU's attention kernels are judged.

use rayon::ThreadPool;

use crate::matmul::{Mat, MatMut, matmul};
use crate::real::Real;

/// A product of two square matrices of `size` rows, its rows shared out evenly among the threads it is called with:
/// what the library gives where nothing stands in its way. Each call computes it anew.
pub fn square_product<R: Real>(size: usize) -> impl FnMut(&ThreadPool) {
    let fill = |factor: f64| (0..size * size).map(move |i| R::from_f64((i as f64 * factor).sin()));
    let (a, b): (Vec<R>, Vec<R>) = (fill(0.37).collect(), fill(0.61).collect());
    let mut c = vec![R::ZERO; size * size];
    move |threads| {
        let rows = size.div_ceil(threads.current_num_threads());
        threads.scope(|scope| {
            for (a, c) in a.chunks(rows * size).zip(c.chunks_mut(rows * size)) {
                let b = &b;
                scope.spawn(move |_| {
                    let rows = c.len() / size;
                    let (a, b) = (Mat::new(a, rows, size, size), Mat::new(b, size, size, size));
                    matmul(R::ONE, a, b, R::ZERO, MatMut::new(c, rows, size, size));
                });
            }
        });
    }
}
