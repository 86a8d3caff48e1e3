//! Chunks to ranks.

mod affinity;
mod capacity;
mod chunk_work;
mod keys;
mod lower_bound;
mod min_heap;
mod received_rows;
mod sequential;
mod zigzag;

pub(crate) use affinity::{Effort, Prices, Reach, Search, settle, settles};
pub(crate) use chunk_work::chunk_work_with_away;
pub use chunk_work::{ChunkWork, chunk_work};
pub use keys::dispatch_keys;
pub use lower_bound::received_rows_lower_bound;
pub use received_rows::received_rows;

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use crate::Planning;

/// How chunks are given to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DispatchAlgorithm {
    /// Few key rows received, with areas within 1 % of the greedy's; of few chunks on up to 16 GPUs the predicted times are levelled
    /// instead, which may leave areas far apart. The default.
    #[default]
    Affinity,
    /// Heaviest chunk first, each to the lightest rank that still has room.
    MinHeap,
    /// Contiguous runs in order.
    Sequential,
    /// Chunk `i` and its mirror to the same rank.
    Zigzag,
}

/// Which rank owns which chunk of a sequence. Chunk `i` is rows `[i * chunk_size, (i + 1) * chunk_size)`, the last one
/// maybe shorter. A rank's local rows are its chunks in ascending order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dispatch {
    seqlen: usize,
    chunk_size: usize,
    rank_chunks: Vec<Vec<u32>>,
}

impl Dispatch {
    pub(crate) fn new(seqlen: usize, chunk_size: usize, mut rank_chunks: Vec<Vec<u32>>) -> Self {
        rank_chunks.iter_mut().for_each(|chunks| chunks.sort_unstable());
        Self { seqlen, chunk_size, rank_chunks }
    }

    /// Rows of the whole sequence.
    pub fn seqlen(&self) -> usize {
        self.seqlen
    }

    /// Rows of a chunk (the last may have fewer).
    pub fn chunk_size(&self) -> usize {
        self.chunk_size
    }

    /// Number of ranks; some may own nothing.
    pub fn cp_size(&self) -> usize {
        self.rank_chunks.len()
    }

    /// Number of chunks.
    pub fn num_chunks(&self) -> usize {
        self.seqlen.div_ceil(self.chunk_size)
    }

    /// The chunks of `rank`, ascending: their order is the order of the rank's local rows.
    pub fn chunks(&self, rank: usize) -> &[u32] {
        &self.rank_chunks[rank]
    }

    /// Rows of chunk `chunk` in global order.
    pub fn chunk_range(&self, chunk: usize) -> Range {
        Range::new(chunk * self.chunk_size, ((chunk + 1) * self.chunk_size).min(self.seqlen))
    }

    /// The global rows that `rank` owns, neighbours merged, ascending: the rank's local rows in order.
    pub fn ranges(&self, rank: usize) -> Vec<Range> {
        let mut out: Vec<Range> = Vec::new();
        for &chunk in self.chunks(rank) {
            let range = self.chunk_range(chunk as usize);
            match out.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => out.push(range),
            }
        }
        out
    }

    /// Number of rows that `rank` owns.
    pub fn tokens(&self, rank: usize) -> usize {
        self.chunks(rank).iter().map(|&chunk| self.chunk_range(chunk as usize).len()).sum()
    }
}

/// Gives every chunk of `work` to a rank, queries and keys together (self-attention): chunk `i` of the queries and chunk
/// `i` of the keys live on the same rank. Counts differ by at most one; with more ranks than chunks some ranks own
/// nothing. `cp_size` must be at least 1.
///
/// A pure function of its input: the same work gives the same dispatch everywhere.
pub fn dispatch(work: &ChunkWork, cp_size: usize, algorithm: DispatchAlgorithm) -> Dispatch {
    solve(work, cp_size, algorithm, Home::WithQueries, &Planning::ALONE)
}

/// Gives every query chunk of `work` to a rank when keys are dispatched on their own (cross-attention), by
/// [`dispatch_keys`]. Otherwise as [`dispatch`].
pub fn dispatch_queries(work: &ChunkWork, cp_size: usize, algorithm: DispatchAlgorithm) -> Dispatch {
    solve(work, cp_size, algorithm, Home::Elsewhere, &Planning::ALONE)
}

/// Where the key rows of a query chunk's own positions live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// On the rank that owns the query chunk.
    WithQueries,
    /// Not known yet: no key row counts as owned.
    Elsewhere,
}

/// As [`dispatch`] and [`dispatch_queries`]. Once it is cancelled, any dispatch.
pub(crate) fn solve(
    work: &ChunkWork,
    cp_size: usize,
    algorithm: DispatchAlgorithm,
    home: Home,
    planning: &Planning<'_>,
) -> Dispatch {
    let chunks = work.num_chunks();
    let rank_chunks = match algorithm {
        DispatchAlgorithm::Affinity => affinity::affinity(work, cp_size, home, planning),
        DispatchAlgorithm::MinHeap => min_heap::min_heap(work.areas(), cp_size),
        DispatchAlgorithm::Sequential => sequential::sequential(chunks, cp_size),
        DispatchAlgorithm::Zigzag => zigzag::zigzag(chunks, cp_size),
    };
    Dispatch::new(work.seqlen_q(), work.chunk_size(), rank_chunks)
}
