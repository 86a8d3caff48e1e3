//! Key rows that a dispatch communicates, before any plan is made of it.

use counterpoint_mask::Range;

use super::{ChunkWork, Dispatch, Home};
use crate::rows::without;

/// Key rows that each rank reads and does not own, exact to the token: what an exchange has to move to it.
///
/// `queries` says who computes which chunk of `work`, `keys` who owns which key rows; the same dispatch twice for
/// self-attention.
pub fn received_rows(work: &ChunkWork, queries: &Dispatch, keys: &Dispatch) -> Vec<u64> {
    (0..queries.cp_size())
        .map(|rank| {
            let needed = needed_rows(work, queries.chunks(rank));
            let received = without(&needed, &keys.ranges(rank));
            received.iter().map(|range| range.len() as u64).sum()
        })
        .collect()
}

/// What a rank would receive that computes `chunks` (ascending).
pub(super) fn received_by(work: &ChunkWork, chunks: &[u32], home: Home) -> u64 {
    let needed = needed_rows(work, chunks);
    let own: Vec<Range> = match home {
        Home::WithQueries => chunks.iter().map(|&chunk| work.rows(chunk as usize)).collect(),
        Home::Elsewhere => Vec::new(),
    };
    without(&needed, &own).iter().map(|range| range.len() as u64).sum()
}

/// The key rows that `chunks` together read, merged and ascending.
pub(super) fn needed_rows(work: &ChunkWork, chunks: &[u32]) -> Vec<Range> {
    Range::merged(chunks.iter().flat_map(|&chunk| work.needs(chunk as usize)).copied().collect())
}
