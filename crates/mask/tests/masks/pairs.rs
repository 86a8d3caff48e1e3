//! A mask against what each pair of a query and a key should see.

use counterpoint_mask::Mask;
use proptest::prelude::*;

/// Compares every pair with `sees(row, col)`.
pub(crate) fn check(mask: &Mask, sees: impl Fn(usize, usize) -> bool) -> Result<(), TestCaseError> {
    let picture = mask.rasterise();
    for row in 0..mask.seqlen_q() {
        for col in 0..mask.seqlen_k() {
            let found = picture[row * mask.seqlen_k() + col];
            prop_assert_eq!(found, sees(row, col), "row {}, column {} of {:?}", row, col, mask);
        }
    }
    // Slices that share a pair would count it twice.
    prop_assert_eq!(mask.area(), picture.iter().filter(|&&sees| sees).count() as u64);
    Ok(())
}
