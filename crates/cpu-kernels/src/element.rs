//! Element types of tensors in host memory, and their conversions.

use counterpoint_plan::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements of a tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub enum HostData {
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 32-bit floats.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// 16-bit floats.
    F16(Vec<f16>),
}

/// An element type of tensors in host memory: where it is stored and how it is converted.
pub trait HostElement: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// The type in which it is summed: f64 for f64, else f32.
    type Accumulator: Accumulator;
    /// Its name as a value.
    const DTYPE: DType;
    /// Exact for every type but f64.
    fn to_f32(self) -> f32;
    /// Exact.
    fn to_f64(self) -> f64;
    /// Rounded once, to nearest even.
    fn from_f32(value: f32) -> Self;
    /// Rounded once, to nearest even.
    fn from_f64(value: f64) -> Self;
    /// Exact.
    fn widen(self) -> Self::Accumulator;
    /// Rounded once, to nearest even.
    fn narrow(value: Self::Accumulator) -> Self;
    /// `src` in the accumulator type, exactly. Both have the same length.
    fn widen_slice(src: &[Self], dst: &mut [Self::Accumulator]);
    /// The elements as they are, where the type is its own accumulator.
    fn accumulators(elements: &[Self]) -> Option<&[Self::Accumulator]>;
    /// `src` rounded to nearest even. Both have the same length.
    fn narrow_slice(src: &[Self::Accumulator], dst: &mut [Self]);
    /// The elements, when they are of this type.
    fn slice(data: &HostData) -> Option<&[Self]>;
    /// The elements, to write, when they are of this type.
    fn slice_mut(data: &mut HostData) -> Option<&mut [Self]>;
    /// Takes ownership of a tensor's elements.
    fn wrap(elements: Vec<Self>) -> HostData;
}

/// f32 or f64: the types in which sums are formed.
pub trait Accumulator:
    HostElement<Accumulator = Self>
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
{
    /// `e^self`.
    fn exp(self) -> Self;
    /// `ln(1 + self)`.
    fn ln_1p(self) -> Self;
}

macro_rules! accumulator {
    ($type:ty) => {
        impl Accumulator for $type {
            #[inline]
            fn exp(self) -> Self {
                self.exp()
            }
            #[inline]
            fn ln_1p(self) -> Self {
                self.ln_1p()
            }
        }
    };
}
accumulator!(f32);
accumulator!(f64);

macro_rules! host_element {
    ($type:ty, $variant:ident, $accumulator:ty, $to_acc:ident, $from_acc:ident,
     $to_f32:expr, $to_f64:expr, $from_f32:expr, $from_f64:expr, $widen_slice:expr, $narrow_slice:expr, $accumulators:expr) => {
        impl HostElement for $type {
            type Accumulator = $accumulator;
            const DTYPE: DType = DType::$variant;
            #[inline]
            fn to_f32(self) -> f32 {
                $to_f32(self)
            }
            #[inline]
            fn to_f64(self) -> f64 {
                $to_f64(self)
            }
            #[inline]
            fn from_f32(value: f32) -> Self {
                $from_f32(value)
            }
            #[inline]
            fn from_f64(value: f64) -> Self {
                $from_f64(value)
            }
            #[inline]
            fn widen(self) -> $accumulator {
                self.$to_acc()
            }
            #[inline]
            fn narrow(value: $accumulator) -> Self {
                Self::$from_acc(value)
            }
            fn widen_slice(src: &[Self], dst: &mut [$accumulator]) {
                $widen_slice(src, dst);
            }
            fn accumulators(elements: &[Self]) -> Option<&[$accumulator]> {
                let accumulators: fn(&[Self]) -> Option<&[$accumulator]> = $accumulators;
                accumulators(elements)
            }
            fn narrow_slice(src: &[$accumulator], dst: &mut [Self]) {
                $narrow_slice(src, dst);
            }
            fn slice(data: &HostData) -> Option<&[Self]> {
                match data {
                    HostData::$variant(elements) => Some(elements),
                    _ => None,
                }
            }
            fn slice_mut(data: &mut HostData) -> Option<&mut [Self]> {
                match data {
                    HostData::$variant(elements) => Some(elements),
                    _ => None,
                }
            }
            fn wrap(elements: Vec<Self>) -> HostData {
                HostData::$variant(elements)
            }
        }
    };
}
host_element!(
    f64,
    F64,
    f64,
    to_f64,
    from_f64,
    |v| v as f32,
    |v| v,
    |v| v as f64,
    |v| v,
    |src, dst: &mut [_]| dst.copy_from_slice(src),
    |src, dst: &mut [_]| dst.copy_from_slice(src),
    |elements| Some(elements)
);
host_element!(
    f32,
    F32,
    f32,
    to_f32,
    from_f32,
    |v| v,
    |v| v as f64,
    |v| v,
    |v| v as f32,
    |src, dst: &mut [_]| dst.copy_from_slice(src),
    |src, dst: &mut [_]| dst.copy_from_slice(src),
    |elements| Some(elements)
);
host_element!(
    bf16,
    Bf16,
    f32,
    to_f32,
    from_f32,
    bf16::to_f32,
    |v: bf16| v.to_f32() as f64,
    bf16::from_f32,
    |v| bf16::from_f32(round_to_odd(v)),
    |src: &[bf16], dst: &mut [f32]| src.convert_to_f32_slice(dst),
    |src: &[f32], dst: &mut [bf16]| dst.convert_from_f32_slice(src),
    |_| None
);
host_element!(
    f16,
    F16,
    f32,
    to_f32,
    from_f32,
    f16::to_f32,
    |v: f16| v.to_f32() as f64,
    f16::from_f32,
    |v| { f16::from_f32(round_to_odd(v)) },
    |src: &[f16], dst: &mut [f32]| src.convert_to_f32_slice(dst),
    |src: &[f32], dst: &mut [f16]| dst.convert_from_f32_slice(src),
    |_| None
);

/// f64 to f32, rounding inexact values to the neighbour whose last bit is 1. Rounding that once more, to nearest, to at
/// most 22 bits gives what rounding once would have given (Boldo, Melquiond: Emulation of FMA and correctly rounded
/// sums: proved algorithms using rounding to odd, 2008).
#[inline]
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) == value || value.is_nan() || value.is_infinite() {
        return nearest;
    }
    let bits = nearest.to_bits();
    let truncated = if f64::from(nearest.abs()) > value.abs() { bits - 1 } else { bits };
    f32::from_bits(truncated | 1)
}

/// One element in another type, rounded once.
pub fn convert_element<A: HostElement, B: HostElement>(value: A) -> B {
    if A::DTYPE == DType::F64 || B::DTYPE == DType::F64 {
        B::from_f64(value.to_f64())
    } else {
        B::from_f32(value.to_f32())
    }
}

/// Runs an expression with `$type` standing for the element type of a [`DType`]. Whose crate uses it names `counterpoint-plan` and `half`
/// among its dependencies.
#[macro_export]
macro_rules! with_host_element {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            counterpoint_plan::DType::F64 => {
                type $type = f64;
                $body
            }
            counterpoint_plan::DType::F32 => {
                type $type = f32;
                $body
            }
            counterpoint_plan::DType::Bf16 => {
                type $type = half::bf16;
                $body
            }
            counterpoint_plan::DType::F16 => {
                type $type = half::f16;
                $body
            }
        }
    };
}
pub(crate) use with_host_element;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The nearest of all values of a 16-bit type, found by looking at every one; ties to the even pattern.
    fn nearest_bf16(value: f64) -> bf16 {
        let mut best = bf16::ZERO;
        for bits in 0..=u16::MAX {
            let candidate = bf16::from_bits(bits);
            if !candidate.is_finite() {
                continue;
            }
            let (old, new) = ((best.to_f64() - value).abs(), (candidate.to_f64() - value).abs());
            if new < old || (new == old && bits & 1 == 0) {
                best = candidate;
            }
        }
        best
    }

    #[test]
    fn f64_to_bf16_rounds_once() {
        // Just above a tie: rounding to f32 first would lose the last bit and then round down.
        let above_tie = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(bf16::from_f64(above_tie).to_f64(), 1.0);
        assert_eq!(<bf16 as HostElement>::from_f64(above_tie).to_f64(), 1.0 + 2f64.powi(-7));
        assert_eq!(<bf16 as HostElement>::from_f64(f64::NEG_INFINITY), bf16::NEG_INFINITY);
        assert!(<f16 as HostElement>::from_f64(f64::NAN).is_nan());
        assert_eq!(<f16 as HostElement>::from_f64(1e300), f16::INFINITY);
        assert_eq!(<f16 as HostElement>::from_f64(-1e-300).to_f64(), 0.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn f64_to_bf16_is_the_nearest(value in -4.0f64..4.0) {
            prop_assert_eq!(<bf16 as HostElement>::from_f64(value).to_f64(), nearest_bf16(value).to_f64());
        }

        #[test]
        fn widening_and_back_is_the_identity(bits in any::<u16>()) {
            let value = f16::from_bits(bits);
            prop_assume!(!value.is_nan());
            prop_assert_eq!(convert_element::<f64, f16>(convert_element::<f16, f64>(value)), value);
            prop_assert_eq!(convert_element::<f32, f16>(convert_element::<f16, f32>(value)), value);
        }
    }
}
