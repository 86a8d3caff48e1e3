mod coverage;
mod pairing;
mod segments;
mod stretch;
mod trade;

use super::min_heap::min_heap;
use super::received_rows::received_by;
use super::sequential::sequential;
use super::{ChunkWork, Home};
use pairing::pair_heavy_with_light;
use segments::Segments;
use stretch::{join_small, stretches};
use trade::trade;

/// Sizes below which neighbouring stretches are joined, in chunks: each gives one start. Which is best depends on the
/// lengths of the documents against a rank's share, and trying is cheaper than knowing.
const SMALL: [usize; 7] = [1, 4, 8, 16, 24, 32, 64];

pub(super) fn affinity(work: &ChunkWork, ranks: usize, home: Home) -> Vec<Vec<u32>> {
    let greedy = Candidate::new(work, home, min_heap(work.areas(), ranks));
    if greedy.total == 0 {
        return greedy.rank_chunks;
    }
    let limit = area_limit(work, ranks, greedy.max_area);
    let mut best = Candidate::new(work, home, sequential(work.num_chunks(), ranks));
    let stretches = stretches(work);
    let mut tried = Vec::new();
    for small in SMALL {
        let joined = join_small(&stretches, small);
        if tried.contains(&joined) {
            continue;
        }
        let start = Candidate::new(work, home, pair_heavy_with_light(work, &joined, ranks));
        tried.push(joined);
        if start.cost(limit) < best.cost(limit) {
            best = start;
        }
    }
    let mut traded = best.rank_chunks.clone();
    trade(work, &Segments::new(work, home), &mut traded, limit);
    let traded = Candidate::new(work, home, traded);
    if traded.cost(limit) < best.cost(limit) {
        best = traded;
    }
    let fits = best.max_area <= limit && best.max_received <= greedy.max_received;
    if fits && best.cost(limit) < greedy.cost(limit) { best.rank_chunks } else { greedy.rank_chunks }
}

/// The largest area that a rank may get: 1 % above the mean, or 1 % above the greedy's largest where the greedy itself is
/// worse than that.
fn area_limit(work: &ChunkWork, ranks: usize, greedy_max: u64) -> u64 {
    let total: u128 = work.areas().iter().map(|&area| u128::from(area)).sum();
    let limit = (total * 101 / (100 * ranks as u128)) as u64;
    if greedy_max <= limit { limit } else { greedy_max + greedy_max / 100 }
}

/// A dispatch and what it costs.
struct Candidate {
    rank_chunks: Vec<Vec<u32>>,
    max_area: u64,
    /// Rows received by all ranks together.
    total: u64,
    /// Rows received by the rank that receives most.
    max_received: u64,
}

impl Candidate {
    fn new(work: &ChunkWork, home: Home, mut rank_chunks: Vec<Vec<u32>>) -> Self {
        let (mut max_area, mut total, mut max_received) = (0, 0, 0);
        for chunks in &mut rank_chunks {
            chunks.sort_unstable();
            let area: u64 = chunks.iter().map(|&chunk| work.area(chunk as usize)).sum();
            let received = received_by(work, chunks, home);
            max_area = max_area.max(area);
            total += received;
            max_received = max_received.max(received);
        }
        Self { rank_chunks, max_area, total, max_received }
    }

    /// Smaller is better: area above the limit in whole percents first; then the product of the largest area and the
    /// rows, so that one percent of balance is worth one percent of traffic.
    fn cost(&self, limit: u64) -> (u128, u128) {
        let over = u128::from(self.max_area.saturating_sub(limit));
        ((over * 100).div_ceil(u128::from(limit.max(1))), u128::from(self.max_area) * u128::from(self.total))
    }
}
