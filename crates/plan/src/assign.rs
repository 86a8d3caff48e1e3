use counterpoint_mask::Mask;

use crate::{Dispatch, PlanConfig, chunk_work, dispatch, dispatch_keys, dispatch_queries};

/// Chunk size for `seqlen` rows on `ranks` ranks when none was asked for: a power of two in `[64, 2048]` that gives every
/// rank at least 16 chunks where the length allows, so that there is something to balance.
pub(crate) fn pick_chunk_size(seqlen: usize, ranks: usize) -> usize {
    let wanted = seqlen / (16 * ranks);
    match wanted.checked_ilog2() {
        Some(log) => (1_usize << log).clamp(64, 2048),
        None => 64,
    }
}

fn chunk_size(seqlen: usize, config: &PlanConfig) -> usize {
    config.chunk_size.unwrap_or_else(|| pick_chunk_size(seqlen, config.topology.world_size))
}

pub(crate) fn dispatch_self(mask: &Mask, config: &PlanConfig) -> Dispatch {
    let work = chunk_work(mask, chunk_size(mask.seqlen_q(), config));
    dispatch(&work, config.topology.world_size, config.dispatch)
}

/// Queries and keys by a solve each.
pub(crate) fn dispatch_cross(mask: &Mask, config: &PlanConfig) -> (Dispatch, Dispatch) {
    let work = chunk_work(mask, chunk_size(mask.seqlen_q(), config));
    let queries = dispatch_queries(&work, config.topology.world_size, config.dispatch);
    let keys = dispatch_keys(&work, &queries, chunk_size(mask.seqlen_k(), config));
    (queries, keys)
}
