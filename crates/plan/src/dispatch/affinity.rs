use super::min_heap::min_heap;
use super::{ChunkWork, Home};

pub(super) fn affinity(work: &ChunkWork, ranks: usize, _home: Home) -> Vec<Vec<u32>> {
    min_heap(work.areas(), ranks)
}
