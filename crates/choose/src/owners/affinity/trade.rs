//! Fewer received rows by swaps of two chunks at a level load, within a budget of steps; and the random numbers of both searches.

use counterpoint_plan::{ChunkWork, Planning};

use super::coverage::Coverage;
use super::segments::Segments;

/// Swaps that are proposed. A budget and no clock: the result is the same on every machine.
const PROPOSALS: usize = 64_000;
/// Steps over ranges and words of coverage that may be spent on them; what bounds the time where chunks read far or in
/// many pieces.
const STEPS: usize = 2_000_000;
/// Proposals in a row without a gain after which there is nothing to be had: [`PATIENCE_OF_CHUNK`] for each chunk, within these.
const PATIENCE: (usize, usize) = (2_048, 8_192);
const PATIENCE_OF_CHUNK: usize = 16;
/// Steps that building the coverage may take. Chunks of a long causal sequence read far, so their steps grow with the
/// square of their number; from some 46,000 of them on, what [`STEPS`] leaves for proposals would gain next to nothing.
const BUILD_STEPS: usize = 8 * STEPS;
/// Largest coverage that is kept, in words: beyond it the start stays as it is. Reached from about 4,096 ranks with
/// 64,000 segments on.
const MAX_COVERAGE: usize = 1 << 22;

/// Descent by swaps of two chunks. Counts stay as they are, and no swap adds area above `limit`.
///
/// A swap is weighed by three terms: the rows that it saves; area above the mean, at the rate at which one percent of a
/// rank's area is worth one percent of the rows that a rank receives; and area above the limit, one percent of which
/// outweighs the whole key sequence. So a causal sequence, whose traffic no dispatch avoids, keeps its balance.
// Long: one pass over pairs, whose bookkeeping every branch changes.
pub(super) fn trade(
    work: &ChunkWork,
    segments: &Segments,
    rank_chunks: &mut [Vec<u32>],
    limit: u64,
    planning: &Planning<'_>,
) {
    let (chunks, ranks) = (work.num_chunks(), rank_chunks.len());
    if ranks < 2 || chunks < 2 || ranks * segments.words() > MAX_COVERAGE {
        return;
    }
    let steps: Vec<usize> = (0..chunks as u32).map(|chunk| segments.steps(chunk)).collect();
    if steps.iter().sum::<usize>() > BUILD_STEPS {
        return;
    }
    let area = |chunk: u32| work.area(chunk as usize) as i64;
    let mut loads: Vec<i64> =
        rank_chunks.iter().map(|chunks| chunks.iter().map(|&chunk| area(chunk)).sum()).collect();
    let mean = (loads.iter().sum::<i64>() / ranks as i64).max(1);
    let limit = limit as i64;
    let over = |load: i64, limit: i64| (load - limit).max(0);

    let mut seats = vec![Seat::default(); chunks];
    for (rank, chunks) in rank_chunks.iter().enumerate() {
        for (place, &chunk) in chunks.iter().enumerate() {
            seats[chunk as usize] = Seat { rank: rank as u32, place: place as u32 };
        }
    }
    let mut coverage = Coverage::new(segments, rank_chunks);
    let received = (0..ranks).map(|rank| coverage.received(rank)).sum::<i64>() / ranks as i64;
    let mut draw = Draw::default();
    let patience = (PATIENCE_OF_CHUNK * chunks).clamp(PATIENCE.0, PATIENCE.1);
    let mut since_gain = 0;
    let mut left = STEPS;
    for _ in 0..PROPOSALS {
        since_gain += 1;
        if since_gain > patience || planning.is_cancelled() {
            break;
        }
        let a = draw.below(chunks);
        // A rank that owns a neighbour likely reads most of what this chunk reads.
        let b = match draw.below(8) {
            0 | 1 => draw.below(chunks) as u32,
            way => {
                let neighbour = if way % 2 == 0 { (a + 1).min(chunks - 1) } else { a.saturating_sub(1) };
                let chunks = &rank_chunks[seats[neighbour].rank as usize];
                chunks[draw.below(chunks.len())]
            }
        };
        let a = a as u32;
        let (from, to) = (seats[a as usize], seats[b as usize]);
        let (rank_a, rank_b) = (from.rank as usize, to.rank as usize);
        if rank_a == rank_b {
            continue;
        }
        let gain = area(b) - area(a);
        let (load_a, load_b) = (loads[rank_a] + gain, loads[rank_b] - gain);
        let change = |limit| {
            over(load_a, limit) + over(load_b, limit)
                - over(loads[rank_a], limit)
                - over(loads[rank_b], limit)
        };
        let (over_mean, over_limit) = (change(mean), change(limit));
        if over_limit > 0 {
            continue;
        }
        let spent = 4 * (steps[a as usize] + steps[b as usize]);
        if spent > left {
            break;
        }
        left -= spent;
        let rows = coverage.change(rank_a, a, b) + coverage.change(rank_b, b, a);
        let weighed = i128::from(rows) * i128::from(mean)
            + i128::from(over_mean) * i128::from(received)
            + i128::from(over_limit) * 100 * work.seqlen_k() as i128;
        if weighed >= 0 {
            continue;
        }
        since_gain = 0;
        rank_chunks[rank_a][from.place as usize] = b;
        rank_chunks[rank_b][to.place as usize] = a;
        (seats[a as usize], seats[b as usize]) = (to, from);
        (loads[rank_a], loads[rank_b]) = (load_a, load_b);
        let refreshed = rank_chunks[rank_a].iter().chain(&rank_chunks[rank_b]);
        let spent = 2 * segments.words() + refreshed.map(|&chunk| steps[chunk as usize]).sum::<usize>();
        left = left.saturating_sub(spent);
        coverage.refresh(rank_a, &rank_chunks[rank_a]);
        coverage.refresh(rank_b, &rank_chunks[rank_b]);
    }
}

/// Where a chunk is: place `place` in the list of `rank`.
#[derive(Clone, Copy, Default)]
struct Seat {
    rank: u32,
    place: u32,
}

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) from a fixed seed.
#[derive(Clone, Copy, Default)]
pub(super) struct Draw(u64);

impl Draw {
    /// A number below `end`, which must be at least 1.
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let mixed = mixed ^ (mixed >> 31);
        (((mixed >> 32) * end as u64) >> 32) as usize
    }
}
