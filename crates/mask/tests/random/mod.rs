//! Random masks.

use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use proptest::prelude::*;

/// Cuts `[0, length)` at `cuts` (any numbers, taken modulo the length) and returns the non-empty pieces.
fn pieces(length: usize, cuts: &[usize]) -> Vec<Range> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut % (length + 1)).collect();
    at.extend([0, length]);
    at.sort_unstable();
    at.dedup();
    at.windows(2).map(|pair| Range::new(pair[0], pair[1])).collect()
}

/// Disjoint slices of all types: one axis cut into strips, every strip cut on its own along the other, some cells left
/// out, order shuffled.
pub(crate) fn masks(longest: usize) -> impl Strategy<Value = Mask> {
    let strip = (proptest::collection::vec(any::<usize>(), 0..4), proptest::collection::vec(0..6_u8, 5));
    let strips = proptest::collection::vec(strip, 1..7);
    let length = prop_oneof![Just(None), (1..=longest).prop_map(Some)];
    (
        1..=longest,
        length,
        strips,
        proptest::collection::vec(any::<usize>(), 0..6),
        any::<bool>(),
        any::<u64>(),
    )
        .prop_map(|(seqlen_q, seqlen_k, strips, cuts, transposed, seed)| {
            let seqlen_k = seqlen_k.unwrap_or(seqlen_q);
            let (outer, inner) = if transposed { (seqlen_k, seqlen_q) } else { (seqlen_q, seqlen_k) };
            let mut slices = Vec::new();
            for (index, strip) in pieces(outer, &cuts).into_iter().enumerate() {
                let (inner_cuts, types) = &strips[index % strips.len()];
                for (cell, kind) in pieces(inner, inner_cuts).into_iter().zip(types) {
                    let mask_type = match kind {
                        0 => MaskType::Full,
                        1 => MaskType::Causal,
                        2 => MaskType::InvCausal,
                        3 => MaskType::BiCausal,
                        _ => continue,
                    };
                    let (q_range, k_range) = if transposed { (cell, strip) } else { (strip, cell) };
                    slices.push(AttnSlice::new(q_range, k_range, mask_type));
                }
            }
            // A seeded Fisher-Yates shuffle: the order of slices must not matter to anyone.
            let mut state = seed | 1;
            for last in (1..slices.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                slices.swap(last, (state >> 33) as usize % (last + 1));
            }
            Mask::new(seqlen_q, seqlen_k, slices).expect("cells of strips are disjoint")
        })
}
