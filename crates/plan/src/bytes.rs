//! Refuses problems whose bytes, over all ranks, exceed what a 64-bit counter holds.

use crate::PlanError;

/// The most bytes of a problem. Sums over both passes and the levels of a network have room above.
const MOST: u64 = 1 << 62;

/// Refuses tensors of more than [`MOST`] bytes. `elements` has the shape of each tensor. Each rank may hold all of them, at `element_bytes`
/// an element.
pub(crate) fn check<const N: usize, const AXES: usize>(
    ranks: usize,
    elements: [[f64; AXES]; N],
    element_bytes: usize,
) -> Result<(), PlanError> {
    let elements: f64 = elements.iter().map(|axes| axes.iter().product::<f64>()).sum();
    if elements * ranks as f64 * element_bytes as f64 <= MOST as f64 {
        return Ok(());
    }
    Err(PlanError::Bytes { ranks, most: MOST })
}
