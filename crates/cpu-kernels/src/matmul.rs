//! Matrix products of the library `matrixmultiply`, behind checked views.
//!
//! The library takes raw pointers and strides. This file is the one place in the crate that may call it: every view
//! proves on construction that its last element lies inside its slice, so the calls below cannot leave the slices.
#![allow(unsafe_code)]

/// The library's routine for one type.
pub trait Gemm: Sized {
    /// `c = alpha a b + beta c`; with `beta = 0` the old `c` is not read.
    ///
    /// # Safety
    /// Pointers and strides as `matrixmultiply::sgemm` wants them: every element of the three matrices valid.
    #[doc(hidden)]
    unsafe fn gemm(
        size: (usize, usize, usize),
        alpha: Self,
        a: (*const Self, isize, isize),
        b: (*const Self, isize, isize),
        beta: Self,
        c: (*mut Self, isize, isize),
    );
}

macro_rules! gemm {
    ($type:ty, $routine:path) => {
        impl Gemm for $type {
            unsafe fn gemm(
                (m, k, n): (usize, usize, usize),
                alpha: $type,
                (a, rsa, csa): (*const $type, isize, isize),
                (b, rsb, csb): (*const $type, isize, isize),
                beta: $type,
                (c, rsc, csc): (*mut $type, isize, isize),
            ) {
                // SAFETY: the caller's promise is the routine's own.
                unsafe { $routine(m, k, n, alpha, a, rsa, csa, b, rsb, csb, beta, c, rsc, csc) }
            }
        }
    };
}
gemm!(f32, matrixmultiply::sgemm);
gemm!(f64, matrixmultiply::dgemm);

/// A matrix to read.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, R> {
    data: &'a [R],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, R> Mat<'a, R> {
    /// Row-major `rows` x `cols` whose rows begin `row_stride` elements apart.
    ///
    /// # Panics
    /// When `data` does not hold it.
    pub(crate) fn new(data: &'a [R], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transposed matrix, without moving an element.
    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// A row-major matrix to write.
pub(crate) struct MatMut<'a, R> {
    data: &'a mut [R],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, R> MatMut<'a, R> {
    /// As [`Mat::new`].
    ///
    /// # Panics
    /// When `data` does not hold it.
    pub(crate) fn new(data: &'a mut [R], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride }
    }
}

fn check(len: usize, rows: usize, cols: usize, row_stride: usize) {
    assert!(cols <= row_stride, "rows of {cols} elements overlap at stride {row_stride}");
    let end = rows.checked_sub(1).and_then(|last| last.checked_mul(row_stride)).map(|at| at + cols);
    assert!(end.unwrap_or(0) <= len, "{rows} x {cols} at stride {row_stride} in {len} elements");
}

/// `c = alpha a b + beta c`; with `beta = 0` the old `c` is not read.
///
/// The value of an element depends on its row of `a`, its column of `b` and (in its last bit, where `beta` is not 0) on
/// whether it lies in the rim of `c` that does not fill a register tile, on nothing else.
///
/// # Panics
/// When the shapes do not fit.
pub(crate) fn matmul<R: Gemm>(alpha: R, a: Mat<'_, R>, b: Mat<'_, R>, beta: R, c: MatMut<'_, R>) {
    assert_eq!((a.rows, a.cols, b.cols), (c.rows, b.rows, c.cols), "shapes of a matrix product");
    // SAFETY: `check` has proved for each view that element (rows - 1, cols - 1) lies in its slice, and strides are not
    // negative, so every element does; `transposed` only renames the axes. `c` is borrowed mutably, so it overlaps
    // neither input, and its rows do not overlap each other. Slices span less than isize::MAX bytes, so strides of a
    // matrix with elements fit isize; a matrix without elements is not dereferenced.
    unsafe {
        R::gemm(
            (a.rows, a.cols, b.cols),
            alpha,
            (a.data.as_ptr(), a.row_stride as isize, a.col_stride as isize),
            (b.data.as_ptr(), b.row_stride as isize, b.col_stride as isize),
            beta,
            (c.data.as_mut_ptr(), c.row_stride as isize, 1),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(a: &[f64], b: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
        let mut c = vec![0.0; m * n];
        for i in 0..m {
            for j in 0..n {
                c[i * n + j] = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
            }
        }
        c
    }

    #[test]
    fn products_of_views() {
        let (m, k, n) = (5, 7, 3);
        let a: Vec<f64> = (0..m * k).map(|x| (x as f64 * 0.7).sin()).collect();
        let b: Vec<f64> = (0..k * n).map(|x| (x as f64 * 0.3).cos()).collect();
        let expected = naive(&a, &b, m, k, n);
        // c lies in wider rows; the rest must stay.
        let mut c = vec![f64::NAN; m * (n + 2)];
        matmul(1.0, Mat::new(&a, m, k, k), Mat::new(&b, k, n, n), 0.0, MatMut::new(&mut c, m, n, n + 2));
        for i in 0..m {
            for j in 0..n {
                assert!((c[i * (n + 2) + j] - expected[i * n + j]).abs() < 1e-14);
            }
            assert!(c[i * (n + 2) + n].is_nan());
        }
        // (b^T a^T)^T = a b
        let mut d = vec![1.0; n * m];
        matmul(
            2.0,
            Mat::new(&b, k, n, n).transposed(),
            Mat::new(&a, m, k, k).transposed(),
            1.0,
            MatMut::new(&mut d, n, m, m),
        );
        for i in 0..m {
            for j in 0..n {
                assert!((d[j * m + i] - (1.0 + 2.0 * expected[i * n + j])).abs() < 1e-14);
            }
        }
    }

    #[test]
    #[should_panic(expected = "2 x 3 at stride 3 in 5 elements")]
    fn views_are_checked() {
        let _ = Mat::new(&[0.0f32; 5], 2, 3, 3);
    }
}
