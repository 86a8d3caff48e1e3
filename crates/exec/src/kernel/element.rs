use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

use counterpoint_plan::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::exponential::{exp_f32, tanh_f32};
use super::matmul::Gemm;

/// A type in which tensors are stored.
pub trait Element: Copy + Default + Send + Sync + PartialEq + Debug + 'static {
    /// The type in which products are formed and sums are held.
    type Acc: Real;
    /// The same type as a value.
    const DTYPE: DType;
    /// `src` in the accumulator type, exactly. Both have the same length.
    fn widen(src: &[Self], dst: &mut [Self::Acc]);
    /// `src` rounded to nearest even. Both have the same length.
    fn narrow(src: &[Self::Acc], dst: &mut [Self]);
    /// The value as f64, exactly.
    fn to_f64(self) -> f64;
    /// The nearest value.
    fn from_f64(value: f64) -> Self;
}

/// A type in which kernels calculate: f32 or f64.
pub trait Real:
    Element<Acc = Self>
    + Gemm
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Positive infinity.
    const INFINITY: Self;
    /// The largest finite value.
    const MAX: Self;
    /// `e^self`; `-inf` gives 0.
    fn exp(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;

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

impl Element for f64 {
    type Acc = f64;
    const DTYPE: DType = DType::F64;

    fn widen(src: &[f64], dst: &mut [f64]) {
        dst.copy_from_slice(src);
    }

    fn narrow(src: &[f64], dst: &mut [f64]) {
        dst.copy_from_slice(src);
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn from_f64(value: f64) -> f64 {
        value
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const INFINITY: f64 = f64::INFINITY;
    const MAX: f64 = f64::MAX;

    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }
}

impl Element for f32 {
    type Acc = f32;
    const DTYPE: DType = DType::F32;

    fn widen(src: &[f32], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    fn narrow(src: &[f32], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn from_f64(value: f64) -> f32 {
        value as f32
    }
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const INFINITY: f32 = f32::INFINITY;
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }

    #[inline(always)]
    fn tanh(self) -> f32 {
        tanh_f32(self)
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        f32::ln(self)
    }
}

macro_rules! half_element {
    ($type:ty, $dtype:expr) => {
        impl Element for $type {
            type Acc = f32;
            const DTYPE: DType = $dtype;

            fn widen(src: &[$type], dst: &mut [f32]) {
                src.convert_to_f32_slice(dst);
            }

            fn narrow(src: &[f32], dst: &mut [$type]) {
                dst.convert_from_f32_slice(src);
            }

            fn to_f64(self) -> f64 {
                <$type>::to_f64(self)
            }

            fn from_f64(value: f64) -> $type {
                <$type>::from_f64(value)
            }
        }
    };
}
half_element!(bf16, DType::Bf16);
half_element!(f16, DType::F16);
