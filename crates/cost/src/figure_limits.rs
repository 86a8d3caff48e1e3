//! Within which limits figures of a machine must be.

use std::fmt::{Debug, Display};
use std::ops::RangeInclusive;

use crate::CostError;

/// Rates and costs of any machine, by a wide margin: what is predicted of the largest problem with the worst of them stays far
/// within the range of f64, so nothing that follows from a profile need look out for infinities.
pub(crate) const RATES: RangeInclusive<f64> = 1e-6..=1e30;
pub(crate) const COSTS: RangeInclusive<f64> = 0.0..=1e9;
/// Workers of a device, by a wide margin.
pub(crate) const MOST_WORKERS: usize = 1 << 20;

/// Refuses a figure that is not within `wanted`.
pub(crate) fn check_figure<T: PartialOrd + Display + Debug>(
    field: &'static str,
    value: T,
    wanted: RangeInclusive<T>,
) -> Result<(), CostError> {
    if wanted.contains(&value) {
        return Ok(());
    }
    let wanted = format!("from {:?} to {:?}", wanted.start(), wanted.end());
    Err(CostError { field, value: value.to_string(), wanted })
}
