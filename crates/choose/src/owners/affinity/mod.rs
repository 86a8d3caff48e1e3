//! Few key rows received at a level load: the default dispatch.
//!
//! Balance and traffic pull apart. Runs of neighbouring chunks receive next to nothing and are two to six times too heavy
//! for some rank; the greedy is level and gives every rank a chunk of every document, so that each fetches nearly all
//! keys. Two facts about causal documents show the way between:
//!
//! * a rank that computes some chunks of a document needs the document up to the last of them, whatever the others are.
//!   So few ranks should share a document, each of them should fill its area there, and a further chunk below the last
//!   one is free;
//! * a rank full of heavy chunks has room left in its count, which light chunks fill. Short documents and heads of long
//!   ones cost little wherever a run of them is cut.
//!
//! So: lay the documents (`clusters`) in a line from heavy to light and let every rank take a run from both ends
//! (`pairing`); do so for several ways of keeping short documents together, and keep the best; then improve it by swaps
//! of two chunks (`trade`) whose effect on received rows is known exactly from a few words (`segments`, `coverage`).
//! Nothing here knows documents: a cluster is what reads common keys, so every mask takes the same path, and the greedy
//! stays where nothing better is found.
//!
//! Measured on 1M tokens of packed documents in chunks of 512, varlen causal; mean key rows received by a rank, balance,
//! time of `chunk_work` and `dispatch` on one core of a shared machine. Annealed: 12 s of simulated annealing over swaps.
//!
//! | documents | ranks | greedy | annealed | affinity | balance | time |
//! |---|---|---|---|---|---|---|
//! | lognormal | 8 | 440,999 | 17,788 | 14,762 | 1.003 | 1.2 ms |
//! | lognormal | 64 | 133,809 | 22,818 | 18,830 | 1.010 | 2.8 ms |
//! | pareto | 8 | 677,208 | 67,810 | 72,387 | 1.005 | 2.6 ms |
//! | pareto | 64 | 431,095 | 95,279 | 92,275 | 1.010 | 2.9 ms |
//!
//! 4M tokens causal, chunk 2048: 9 ms for 1,024 ranks, where traffic cannot be avoided and balance is kept at 1.000.

mod clusters;
mod coverage;
mod heaviest;
mod links;
mod local_search;
mod pairing;
mod segments;
mod trade;

use counterpoint_plan::{ChunkWork, Planning};

use super::key_owners::{KeyOwners, received_by};
use super::min_heap::min_heap;
use super::sequential::sequential;
use clusters::{clusters, join_small};
pub(super) use links::Reach;
pub(super) use local_search::{Effort, Prices, Search, is_searched, local_search};
use pairing::pair_heavy_with_light;
use segments::Segments;
use trade::trade;

/// Sizes below which neighbouring clusters are joined, in chunks: each gives one start. Which is best depends on the
/// lengths of the documents against a rank's share, and trying is cheaper than knowing.
const SMALL: [usize; 7] = [1, 4, 8, 16, 24, 32, 64];

/// See the module. At least as good as the greedy: rows received in all and by the slowest rank, and balance within
/// [`area_limit`].
pub(super) fn affinity(
    work: &ChunkWork,
    ranks: usize,
    key_owners: KeyOwners,
    planning: &Planning<'_>,
) -> Vec<Vec<u32>> {
    let greedy = Candidate::new(work, key_owners, min_heap(work.areas(), ranks));
    if greedy.total == 0 {
        return greedy.rank_chunks;
    }
    let limit = area_limit(work, ranks, greedy.max_area);
    let mut best = Candidate::new(work, key_owners, sequential(work.num_chunks(), ranks));
    let clusters = clusters(work);
    let mut tried = Vec::new();
    for small in SMALL {
        let joined = join_small(&clusters, small);
        if !tried.contains(&joined) {
            tried.push(joined);
        }
    }
    let start = |at: usize| Candidate::new(work, key_owners, pair_heavy_with_light(work, &tried[at], ranks));
    // None where the plan is not wanted any more.
    for start in planning.map(tried.len(), start).unwrap_or_default() {
        if start.cost(limit) < best.cost(limit) {
            best = start;
        }
    }
    let mut traded = best.rank_chunks.clone();
    trade(work, &Segments::new(work, key_owners), &mut traded, limit, planning);
    let traded = Candidate::new(work, key_owners, traded);
    if traded.cost(limit) < best.cost(limit) {
        best = traded;
    }
    let keeps =
        best.max_area <= limit && best.total <= greedy.total && best.max_received <= greedy.max_received;
    if keeps && best.cost(limit) < greedy.cost(limit) { best.rank_chunks } else { greedy.rank_chunks }
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
    fn new(work: &ChunkWork, key_owners: KeyOwners, mut rank_chunks: Vec<Vec<u32>>) -> Self {
        let (mut max_area, mut total, mut max_received) = (0, 0, 0);
        for chunks in &mut rank_chunks {
            chunks.sort_unstable();
            let area: u64 = chunks.iter().map(|&chunk| work.area(chunk as usize)).sum();
            let received = received_by(work, chunks, key_owners);
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
