//! Who owns which chunk: the dispatch algorithms, by areas and rows, and the search by predicted seconds that follows the affinity one.

mod affinity;
mod by_seconds;
mod capacity;
mod key_owners;
mod keys;
mod min_heap;
mod sequential;
mod zigzag;

use counterpoint_plan::{ChunkWork, Dispatch, Planning};

use crate::config::DispatchAlgorithm;

pub(crate) use by_seconds::by_seconds;
pub(crate) use key_owners::KeyOwners;
pub use keys::dispatch_keys;

/// Gives every chunk of `work` to a rank, queries and keys together (self-attention): chunk `i` of the queries and chunk
/// `i` of the keys live on the same rank. Counts differ by at most one; with more ranks than chunks some ranks own
/// nothing. `cp_size` must be at least 1.
///
/// A pure function of its input: the same work gives the same dispatch everywhere.
pub fn dispatch(work: &ChunkWork, cp_size: usize, algorithm: DispatchAlgorithm) -> Dispatch {
    solve(work, cp_size, algorithm, KeyOwners::WithQueries, &Planning::ALONE)
}

/// Gives every query chunk of `work` to a rank when keys are dispatched on their own (cross-attention), by
/// [`dispatch_keys`]. Otherwise as [`dispatch`].
pub fn dispatch_queries(work: &ChunkWork, cp_size: usize, algorithm: DispatchAlgorithm) -> Dispatch {
    solve(work, cp_size, algorithm, KeyOwners::Elsewhere, &Planning::ALONE)
}

/// As [`dispatch`] and [`dispatch_queries`]. Once it is cancelled, any dispatch.
pub(crate) fn solve(
    work: &ChunkWork,
    cp_size: usize,
    algorithm: DispatchAlgorithm,
    key_owners: KeyOwners,
    planning: &Planning<'_>,
) -> Dispatch {
    let chunks = work.num_chunks();
    let rank_chunks = match algorithm {
        DispatchAlgorithm::Affinity => affinity::affinity(work, cp_size, key_owners, planning),
        DispatchAlgorithm::MinHeap => min_heap::min_heap(work.areas(), cp_size),
        DispatchAlgorithm::Sequential => sequential::sequential(chunks, cp_size),
        DispatchAlgorithm::Zigzag => zigzag::zigzag(chunks, cp_size),
    };
    Dispatch::new(work.seqlen_q(), work.chunk_size(), rank_chunks)
}
