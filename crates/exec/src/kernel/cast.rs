//! Conversions of tensors between element types on the CPU.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::HostElement;
use crate::host_element::convert_element;

/// Elements that a thread converts at a time.
const CHUNK: usize = 1 << 14;

/// Copies `src` into `dst`, converting the element type; every value is rounded once, to nearest even.
///
/// # Panics
/// When the lengths differ.
pub fn cast<S: HostElement, D: HostElement>(src: &[S], dst: &mut [D], threads: &ThreadPool) {
    assert_eq!(src.len(), dst.len(), "a cast keeps the number of elements");
    threads.install(|| {
        src.par_chunks(CHUNK).zip(dst.par_chunks_mut(CHUNK)).for_each(|(src, dst)| {
            for (src, dst) in src.iter().zip(dst) {
                *dst = convert_element(*src);
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_element_is_converted_whatever_the_threads() {
        let src: Vec<f32> = (0..3 * CHUNK + 5).map(|x| (x as f32).sin()).collect();
        for threads in [1, 3] {
            let threads = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut dst = vec![bf16::NAN; src.len()];
            cast(&src, &mut dst, &threads);
            assert!(dst.iter().zip(&src).all(|(x, y)| *x == bf16::from_f32(*y)));
            let mut wide = vec![f64::NAN; src.len()];
            cast(&dst, &mut wide, &threads);
            assert!(wide.iter().zip(&dst).all(|(x, y)| *x == y.to_f64()));
        }
    }
}
