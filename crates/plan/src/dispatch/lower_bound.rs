use std::cmp::Reverse;

use super::{ChunkWork, Dispatch};

/// Key rows that all ranks together receive at least, in every dispatch of the same number of ranks that asks no more of
/// a rank than this one does: no rank with more chunks, more area or more key rows than the largest here.
///
/// The larger of two bounds, one by ranks and one by key rows. For a full mask both are exact.
pub fn received_rows_lower_bound(work: &ChunkWork, queries: &Dispatch, keys: &Dispatch) -> u64 {
    let ranks = 0..queries.cp_size();
    let area = |rank| queries.chunks(rank).iter().map(|&chunk| work.area(chunk as usize)).sum();
    let most = Most {
        chunks: ranks.clone().map(|rank| queries.chunks(rank).len() as u64).max().unwrap_or(0),
        area: ranks.clone().map(area).max().unwrap_or(0),
        key_rows: ranks.map(|rank| keys.tokens(rank) as u64).max().unwrap_or(0),
    };
    by_ranks(work, &most).max(by_key_rows(work, &most))
}

/// What one rank has at most.
struct Most {
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

/// Sort chunks by the rows that they read, most first. Where the first chunks do not fit on `i` ranks, an `i + 1`th rank
/// computes one of them, so the rank with the `i + 1`th largest need reads at least as many rows as the last of them,
/// and it owns at most as many as any rank does.
fn by_ranks(work: &ChunkWork, most: &Most) -> u64 {
    let reads = |chunk: usize| work.needs(chunk).iter().map(|range| range.len() as u64).sum::<u64>();
    let mut needs: Vec<(u64, u64)> =
        (0..work.num_chunks()).map(|chunk| (reads(chunk), work.area(chunk))).collect();
    needs.sort_unstable_by_key(|&need| Reverse(need));
    let (mut bound, mut ranks, mut area) = (0, 0, 0);
    for (index, (rows, chunk_area)) in needs.into_iter().enumerate() {
        area += chunk_area;
        if most.ranks_for(index as u64 + 1, area) > ranks {
            bound += rows.saturating_sub(most.key_rows);
            ranks += 1;
        }
    }
    bound
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
