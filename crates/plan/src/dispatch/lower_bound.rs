//! How few key rows any dispatch could receive: what a plan's traffic is compared with.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{ChunkWork, Dispatch};

/// Key rows that all ranks together receive at least, in every dispatch of the same number of ranks that asks no more of
/// a rank than this one does: no rank with more chunks, more area or more key rows than the largest here.
///
/// The larger of two bounds, one by ranks and one by key rows. For a full mask both are exact, for a causal one the one by ranks is
/// what a zigzag of as many pieces as two a rank receives.
pub fn received_rows_lower_bound(work: &ChunkWork, queries: &Dispatch, keys: &Dispatch) -> u64 {
    let ranks = 0..queries.cp_size();
    let area = |rank| queries.chunks(rank).iter().map(|&chunk| work.area(chunk as usize)).sum();
    let most = Most {
        ranks: ranks.len() as u64,
        chunks: ranks.clone().map(|rank| queries.chunks(rank).len() as u64).max().unwrap_or(0),
        area: ranks.clone().map(area).max().unwrap_or(0),
        key_rows: ranks.map(|rank| keys.tokens(rank) as u64).max().unwrap_or(0),
    };
    by_ranks(work, &most).max(by_key_rows(work, &most))
}

/// What one rank has at most, and how many there are.
struct Most {
    ranks: u64,
    chunks: u64,
    area: u64,
    key_rows: u64,
}

impl Most {
    /// Ranks that are needed at least for so many chunks of so much area.
    fn ranks_for(&self, chunks: u64, area: u64) -> u64 {
        chunks.div_ceil(self.chunks.max(1)).max(area.div_ceil(self.area.max(1)))
    }
}

/// A rank reads at least what the one of its chunks does that reads most, and owns at most as many rows as any rank. How much that is at
/// least for each rank, in the order of what they read, is known in two ways.
fn by_ranks(work: &ChunkWork, most: &Most) -> u64 {
    let reads = |chunk: usize| work.needs(chunk).iter().map(|range| range.len() as u64).sum::<u64>();
    let mut needs: Vec<(u64, u64)> =
        (0..work.num_chunks()).map(|chunk| (reads(chunk), work.area(chunk))).collect();
    needs.sort_unstable();
    let least = least_upwards(&needs, most).into_iter().zip(least_downwards(&needs, most).into_iter().rev());
    least.map(|(upwards, downwards)| upwards.max(downwards).saturating_sub(most.key_rows)).sum()
}

/// What the rank reads that reads most, the next one, and so on: where the chunks that read most do not fit on `i` ranks, an `i + 1`th
/// rank computes one of them. `needs` are rows and area of each chunk, ascending.
fn least_downwards(needs: &[(u64, u64)], most: &Most) -> Vec<u64> {
    let mut least = Vec::with_capacity(most.ranks as usize);
    let mut area = 0;
    for (index, &(rows, chunk_area)) in needs.iter().rev().enumerate() {
        area += chunk_area;
        if most.ranks_for(index as u64 + 1, area) > least.len() as u64 {
            least.push(rows);
        }
    }
    least.resize(most.ranks as usize, 0);
    least
}

/// What the rank reads that reads least, the next one, and so on: the first `i` have the area that all others leave, each of them full, in
/// no more chunks than `i` may have, so that there must be enough area in so many chunks that read no more than the `i`th rank.
fn least_upwards(needs: &[(u64, u64)], most: &Most) -> Vec<u64> {
    let all: u128 = needs.iter().map(|need| u128::from(need.1)).sum();
    let (mut least, mut rows) = (Vec::with_capacity(most.ranks as usize), 0);
    // The largest areas of the chunks so far, as many as may be counted, and those that are left over.
    let (mut counted, mut left) = (BinaryHeap::new(), BinaryHeap::new());
    let (mut area, mut next) = (0_u128, needs.iter());
    for rank in 1..=most.ranks {
        let wanted = all.saturating_sub(u128::from(most.ranks - rank) * u128::from(most.area));
        let room = (rank * most.chunks) as usize;
        while counted.len() < room
            && let Some(chunk) = left.pop()
        {
            counted.push(Reverse(chunk));
            area += u128::from(chunk);
        }
        while area < wanted
            && let Some(&(reads, chunk)) = next.next()
        {
            rows = reads;
            counted.push(Reverse(chunk));
            area += u128::from(chunk);
            if counted.len() > room
                && let Some(Reverse(smallest)) = counted.pop()
            {
                area -= u128::from(smallest);
                left.push(smallest);
            }
        }
        least.push(rows);
    }
    least
}

/// The chunks that read one key row need some number of ranks. Each of these reads the row, one of them at most owns it,
/// and every other one receives it. The bound is the sum over all key rows.
fn by_key_rows(work: &ChunkWork, most: &Most) -> u64 {
    // Where chunks begin and stop to read, along the key sequence.
    let mut events: Vec<(usize, bool, u64)> = Vec::new();
    for chunk in 0..work.num_chunks() {
        for range in work.needs(chunk) {
            events.push((range.start, true, work.area(chunk)));
            events.push((range.end, false, work.area(chunk)));
        }
    }
    // At the same row chunks stop before others begin; their sums do not care.
    events.sort_unstable();
    let (mut bound, mut row, mut readers, mut area) = (0, 0, 0, 0);
    for (at, begins, chunk_area) in events {
        if readers > 0 {
            bound += (at - row) as u64 * (most.ranks_for(readers, area) - 1);
        }
        row = at;
        if begins {
            readers += 1;
            area += chunk_area;
        } else {
            readers -= 1;
            area -= chunk_area;
        }
    }
    bound
}
