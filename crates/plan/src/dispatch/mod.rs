//! Chunks on ranks: who owns which rows, what chunks compute and read, and what must travel then.

mod chunk_work;
mod lower_bound;
mod received_rows;

pub use chunk_work::{ChunkWork, chunk_work, chunk_work_with_offload, chunk_work_without};
pub use lower_bound::received_rows_lower_bound;
pub use received_rows::received_rows;

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

/// Which rank owns which chunk of a sequence. Chunk `i` is rows `[i * chunk_size, (i + 1) * chunk_size)`, the last one
/// maybe shorter. A rank's local rows are its chunks in ascending order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dispatch {
    seqlen: usize,
    chunk_size: usize,
    rank_chunks: Vec<Vec<u32>>,
}

impl Dispatch {
    /// Of a sequence of `seqlen` rows, whose chunks of `chunk_size` rows belong to the ranks in whose lists they are.
    ///
    /// # Panics
    /// When a chunk is in no list or in two, or `chunk_size` is 0.
    pub fn new(seqlen: usize, chunk_size: usize, mut rank_chunks: Vec<Vec<u32>>) -> Self {
        let mut owned = vec![false; seqlen.div_ceil(chunk_size)];
        for &chunk in rank_chunks.iter().flatten() {
            let is_second = std::mem::replace(&mut owned[chunk as usize], true);
            assert!(!is_second, "chunk {chunk} has two owners");
        }
        assert!(owned.iter().all(|&is_owned| is_owned), "every chunk must have an owner");
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
