//! `exp` and `tanh` of f32 without branches or calls, so that loops over them become vector code on any target.

/// `e^x`, relative error below 2e-7; 0 below -87 (where `e^x` leaves the normal numbers), constant above 88.
///
/// Range reduction by multiples of ln 2 in two parts and a polynomial of degree 5, the scheme and coefficients of
/// Cephes' `expf` (S. Moshier).
#[inline(always)]
pub(crate) fn exp_f32(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const LOWEST: f32 = -87.0;
    const HIGHEST: f32 = 88.0;
    let y = if x > LOWEST { x } else { LOWEST };
    let y = if y < HIGHEST { y } else { HIGHEST };
    let shifted = y * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = y - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127);
    let result = p * f32::from_bits((exponent << 23) as u32);
    if x < LOWEST { 0.0 } else { result }
}

/// `tanh(x)`, relative error below 3e-7: an odd polynomial near 0 (Cephes' `tanhf`, S. Moshier), else by `exp`. And its
/// slope `1 - tanh(x)^2`, as precise relative to itself where tanh is next to 1: with `r = 2 / (e^2|x| + 1)` it is `r (2 - r)`.
#[inline(always)]
pub(crate) fn tanh_and_slope_f32(x: f32) -> (f32, f32) {
    let a = x.abs();
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_909e-2;
    let p = p * z - 5.373_971_5e-2;
    let p = p * z + 1.333_144_2e-1;
    let p = p * z - 3.333_328e-1;
    let near = p * z * x + x;
    let rest = 2.0 / (exp_f32(2.0 * a) + 1.0);
    let far = (1.0 - rest).copysign(x);
    (if a < 0.625 { near } else { far }, rest * (2.0 - rest))
}

/// The same in f64, by the library's functions.
#[inline(always)]
pub(crate) fn tanh_and_slope_f64(x: f64) -> (f64, f64) {
    let rest = 2.0 / ((2.0 * x.abs()).exp() + 1.0);
    (x.tanh(), rest * (2.0 - rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulps() {
        let mut worst = 0.0f64;
        for step in 0..2_000_000 {
            let x = -87.0 + 175.0 * step as f32 / 2_000_000.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp_f32(x)) / exact - 1.0).abs());
        }
        assert!(worst < 2e-7, "{worst:e}");
        assert_eq!(exp_f32(0.0), 1.0);
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(-f32::MAX), 0.0);
        assert_eq!(exp_f32(-87.5), 0.0);
        assert!(exp_f32(f32::INFINITY).is_finite());
        assert!(exp_f32(f32::NAN).is_finite());
    }

    #[test]
    fn tanh_is_within_a_few_ulps() {
        let mut worst = 0.0f64;
        for step in 1..1_000_000 {
            let x = 20.0 * (step as f32 / 1_000_000.0).powi(3);
            let exact = f64::from(x).tanh();
            worst = worst.max((f64::from(tanh_and_slope_f32(x).0) / exact - 1.0).abs());
            assert_eq!(tanh_and_slope_f32(-x).0, -tanh_and_slope_f32(x).0);
        }
        assert!(worst < 3e-7, "{worst:e}");
        assert_eq!(tanh_and_slope_f32(f32::MAX).0, 1.0);
        assert_eq!(tanh_and_slope_f32(0.0).0, 0.0);
    }

    /// Relative to the slope itself, however small: `1 - tanh^2` has no right digit from 9 (f32) or 19 (f64) on.
    #[test]
    fn slopes_of_tanh_keep_their_digits() {
        let (mut worst, mut worst_f64) = (0.0f64, 0.0f64);
        for step in 0..200_000 {
            let x = 40.0 * (f64::from(step) / 200_000.0).powi(2);
            let exact = |x: f64| x.cosh().powi(2).recip();
            let narrow = x as f32;
            let slope = f64::from(tanh_and_slope_f32(narrow).1);
            worst = worst.max((slope / exact(f64::from(narrow)) - 1.0).abs());
            worst_f64 = worst_f64.max((tanh_and_slope_f64(-x).1 / exact(x) - 1.0).abs());
        }
        assert!(worst < 6e-7 && worst_f64 < 2e-15, "{worst:e} {worst_f64:e}");
        for x in [f32::INFINITY, -f32::INFINITY, f32::MAX] {
            assert!(tanh_and_slope_f32(x).1 < 1e-37 && tanh_and_slope_f64(x.into()).1 == 0.0);
        }
        assert_eq!((tanh_and_slope_f32(0.0).1, tanh_and_slope_f64(0.0).1), (1.0, 1.0));
    }
}
