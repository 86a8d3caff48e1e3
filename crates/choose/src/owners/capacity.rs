//! How many chunks each rank gets: counts that differ by at most one.

/// Chunks that `rank` gets: every rank `chunks / ranks`, and one more for each of the first `chunks % ranks`.
pub(super) fn capacity(chunks: usize, ranks: usize, rank: usize) -> usize {
    chunks / ranks + usize::from(rank < chunks % ranks)
}
