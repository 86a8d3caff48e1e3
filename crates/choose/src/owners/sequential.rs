//! The dispatch that leaves the sequence in order.

use super::capacity::capacity;

/// Contiguous runs in order: rank 0 gets the first chunks, the last rank the last ones.
pub(super) fn sequential(chunks: usize, ranks: usize) -> Vec<Vec<u32>> {
    deal(0..chunks as u32, chunks, ranks)
}

/// Cuts a list of all `chunks` into one run a rank.
pub(super) fn deal(order: impl Iterator<Item = u32>, chunks: usize, ranks: usize) -> Vec<Vec<u32>> {
    let mut order = order;
    (0..ranks).map(|rank| order.by_ref().take(capacity(chunks, ranks, rank)).collect()).collect()
}
