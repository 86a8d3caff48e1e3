//! Megatron's dispatch for causal masks: a rank has a chunk from the front and its mirror from the back.

use super::sequential::deal;

/// The sequence folded in the middle and cut into runs: the order is `0, n-1, 1, n-2, …`, so chunk `i` and its mirror
/// `n - 1 - i` lie on one rank (up to one pair a cut, where a rank's count is odd). Under a causal mask the two together
/// cost the same for every `i`.
pub(super) fn zigzag(chunks: usize, ranks: usize) -> Vec<Vec<u32>> {
    let order = (0..chunks).map(|place| match place % 2 {
        0 => place / 2,
        _ => chunks - 1 - place / 2,
    });
    deal(order.map(|chunk| chunk as u32), chunks, ranks)
}
