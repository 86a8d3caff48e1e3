//! Key rows that a dispatch communicates, before any plan is made of it.

use counterpoint_mask::Range;

use super::{ChunkWork, Dispatch};

/// Key rows that each rank reads and does not own, exact to the token: what an exchange has to move to it.
///
/// `queries` says who computes which chunk of `work`, `keys` who owns which key rows; the same dispatch twice for
/// self-attention.
pub fn received_rows(work: &ChunkWork, queries: &Dispatch, keys: &Dispatch) -> Vec<u64> {
    (0..queries.cp_size())
        .map(|rank| {
            let needed = work.needs_of(queries.chunks(rank));
            let received = Range::without(&needed, &keys.ranges(rank));
            received.iter().map(|range| range.len() as u64).sum()
        })
        .collect()
}
