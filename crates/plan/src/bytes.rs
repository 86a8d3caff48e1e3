//! Whether the bytes of a problem can be counted, all of what travels between all ranks together.

use crate::PlanError;

/// Bytes at most: sums over both passes and the levels of a network have room above.
const MOST: u64 = 1 << 62;

/// Refuses tensors of more bytes than can be counted. `elements` are those of each tensor, as the factors that they are the product of; each
/// rank may have all of them, in `element_bytes` bytes.
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
