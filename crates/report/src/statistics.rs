//! Median, extremes and means of timed samples.

use serde::{Deserialize, Serialize};

/// What a set of samples looks like, in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Number of samples.
    pub count: usize,
    /// Middle sample; the mean of the two middle ones when their number is even.
    pub median: f64,
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// Arithmetic mean.
    pub mean: f64,
}

impl Statistics {
    /// Of `samples`, in any order; `None` when there are none or one of them is not a number.
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|sample| sample.is_nan()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let (low, high) = (sorted[(count - 1) / 2], sorted[count / 2]);
        Some(Self {
            count,
            // Halved before the sum, so that huge samples do not overflow.
            median: low / 2.0 + high / 2.0,
            min: sorted[0],
            max: sorted[count - 1],
            mean: sorted.iter().map(|sample| sample / count as f64).sum(),
        })
    }
}

/// The median of `samples` as [`Statistics`] has it; NaN when there are none or one of them is.
pub fn median(samples: &[f64]) -> f64 {
    Statistics::of(samples).map_or(f64::NAN, |statistics| statistics.median)
}

/// Geometric mean, the right mean of ratios; `None` when there are no values or one is not above 0.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    // Asked this way round, NaN is refused too.
    if values.is_empty() || !values.iter().all(|&value| value > 0.0) {
        return None;
    }
    Some((values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_samples() {
        let odd = Statistics::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max, odd.count), (2.0, 1.0, 3.0, 3));
        assert!((odd.mean - 2.0).abs() < 1e-15);
        assert_eq!(Statistics::of(&[4.0, 1.0, 2.0, 8.0]).unwrap().median, 3.0);
        assert_eq!(Statistics::of(&[f64::MAX, f64::MAX]).unwrap().median, f64::MAX);
        assert_eq!(Statistics::of(&[]), None);
        assert!(median(&[3.0, 1.0, 2.0]) == 2.0 && median(&[]).is_nan());
        assert_eq!(Statistics::of(&[1.0, f64::NAN]), None);
        assert!((geometric_mean(&[2.0, 8.0]).unwrap() - 4.0).abs() < 1e-12);
        assert_eq!(geometric_mean(&[]), None);
        assert_eq!(geometric_mean(&[1.0, 0.0]), None);
        assert_eq!(geometric_mean(&[1.0, f64::NAN]), None);
    }

    proptest! {
        #[test]
        fn median_splits_the_samples(samples in prop::collection::vec(-1e6f64..1e6, 1..50)) {
            let statistics = Statistics::of(&samples).unwrap();
            let below = samples.iter().filter(|&&x| x < statistics.median).count();
            let above = samples.iter().filter(|&&x| x > statistics.median).count();
            prop_assert!(below <= samples.len() / 2 && above <= samples.len() / 2);
            prop_assert!(statistics.min <= statistics.median && statistics.median <= statistics.max);
            prop_assert!(samples.contains(&statistics.min) && samples.contains(&statistics.max));
        }

        #[test]
        fn geometric_mean_of_ratios_and_their_inverses_cancel(values in prop::collection::vec(1e-3f64..1e3, 1..30)) {
            let inverses: Vec<f64> = values.iter().map(|value| 1.0 / value).collect();
            let product = geometric_mean(&values).unwrap() * geometric_mean(&inverses).unwrap();
            prop_assert!((product - 1.0).abs() < 1e-12);
        }
    }
}
