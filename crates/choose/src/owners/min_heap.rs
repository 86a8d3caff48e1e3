//! The greedy dispatch: level areas, whatever it costs in traffic.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Longest processing time first, with equal counts: chunks from heavy to light, each to the lightest rank that has
/// room. `chunks % ranks` ranks take one chunk more than the others: the first ones to be lightest when they are full.
/// Ties go to the lower chunk and to the lower rank.
pub(super) fn min_heap(areas: &[u64], ranks: usize) -> Vec<Vec<u32>> {
    let (room, mut larger) = (areas.len() / ranks, areas.len() % ranks);
    let mut order: Vec<u32> = (0..areas.len() as u32).collect();
    order.sort_unstable_by_key(|&chunk| (Reverse(areas[chunk as usize]), chunk));

    let mut lightest: BinaryHeap<Reverse<(u64, usize)>> = (0..ranks).map(|rank| Reverse((0, rank))).collect();
    let mut rank_chunks: Vec<Vec<u32>> = vec![Vec::with_capacity(room + 1); ranks];
    let mut order = order.into_iter();
    let mut next = order.next();
    while let (Some(chunk), Some(Reverse((area, rank)))) = (next, lightest.pop()) {
        let count = rank_chunks[rank].len();
        if count >= room {
            // It is full unless it is one of the larger ranks; either way it does not come back.
            if count > room || larger == 0 {
                continue;
            }
            larger -= 1;
        }
        rank_chunks[rank].push(chunk);
        if rank_chunks[rank].len() <= room {
            lightest.push(Reverse((area + areas[chunk as usize], rank)));
        }
        next = order.next();
    }
    rank_chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_jobs() {
        // Mean 15.5; with two jobs a rank, 16 + 2 = 18 is what the greedy reaches.
        let areas = [2, 4, 3, 16, 13, 5, 9, 10];
        let rank_chunks = min_heap(&areas, 4);
        let loads: Vec<u64> = rank_chunks
            .iter()
            .map(|chunks| chunks.iter().map(|&chunk| areas[chunk as usize]).sum())
            .collect();
        assert_eq!(loads.iter().max(), Some(&18));
        assert!(rank_chunks.iter().all(|chunks| chunks.len() == 2));
    }
}
