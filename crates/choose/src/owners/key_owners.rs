//! Where the key rows of a query chunk's own positions are owned, and what its rank receives then.

use counterpoint_mask::Range;
use counterpoint_plan::ChunkWork;

/// Where the key rows of a query chunk's own positions are owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyOwners {
    /// On the rank that owns the query chunk.
    WithQueries,
    /// Not known yet: no key row counts as owned.
    Elsewhere,
}

/// What a rank would receive that computes `chunks` (ascending).
pub(super) fn received_by(work: &ChunkWork, chunks: &[u32], key_owners: KeyOwners) -> u64 {
    let needed = work.needs_of(chunks);
    let own: Vec<Range> = match key_owners {
        KeyOwners::WithQueries => chunks.iter().map(|&chunk| work.rows(chunk as usize)).collect(),
        KeyOwners::Elsewhere => Vec::new(),
    };
    Range::without(&needed, &own).iter().map(|range| range.len() as u64).sum()
}
