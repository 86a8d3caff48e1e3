//! The types that CPU kernels read, and those that they calculate in, with exponentials fast enough for a softmax.

use std::ops::{AddAssign, MulAssign, Neg};

use crate::element::{Accumulator, HostElement};
use crate::exponential::{exp_f32, tanh_and_slope_f32, tanh_and_slope_f64};
use crate::matmul::Gemm;

/// A type that kernels read and write.
pub trait Element: HostElement<Accumulator: Real> {}

impl<T: HostElement<Accumulator: Real>> Element for T {}

/// A type in which kernels calculate: f32 or f64.
pub trait Real:
    HostElement<Accumulator = Self> + Accumulator + Gemm + Neg<Output = Self> + AddAssign + MulAssign
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Positive infinity.
    const INFINITY: Self;
    /// Not a number.
    const NAN: Self;
    /// The largest finite value.
    const MAX: Self;
    /// `e^self` to about the type's precision, fast in loops over slices; 0 for `-inf`.
    fn fast_exp(self) -> Self;
    /// Hyperbolic tangent and its slope, likewise; the slope of an infinity is 0.
    fn fast_tanh_and_slope(self) -> (Self, Self);
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn square_root(self) -> Self;

    /// The larger one; `other` when `self` is NaN. This order of operands is one machine instruction.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    /// The nearest finite value: overflow saturates, NaN (from opposite overflows) becomes the most negative one.
    /// Finite inputs can overflow a dot product, and an infinite score would turn into NaN in the softmax.
    #[inline(always)]
    fn saturate(self) -> Self {
        let at_least = self.larger(-Self::MAX);
        if at_least < Self::MAX { at_least } else { Self::MAX }
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const INFINITY: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    const MAX: f64 = f64::MAX;

    #[inline(always)]
    fn fast_exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn fast_tanh_and_slope(self) -> (f64, f64) {
        tanh_and_slope_f64(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }

    #[inline(always)]
    fn square_root(self) -> f64 {
        f64::sqrt(self)
    }
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const INFINITY: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn fast_exp(self) -> f32 {
        exp_f32(self)
    }

    #[inline(always)]
    fn fast_tanh_and_slope(self) -> (f32, f32) {
        tanh_and_slope_f32(self)
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        f32::ln(self)
    }

    #[inline(always)]
    fn square_root(self) -> f32 {
        f32::sqrt(self)
    }
}
