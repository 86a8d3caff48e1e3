use counterpoint_mask::Mask;

use crate::{Dispatch, DispatchAlgorithm, PlanConfig};

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

fn spread(seqlen: usize, chunk_size: usize, ranks: usize, algorithm: DispatchAlgorithm) -> Dispatch {
    let chunks = seqlen.div_ceil(chunk_size);
    let mut rank_chunks: Vec<Vec<u32>> = vec![Vec::new(); ranks];
    for chunk in 0..chunks {
        let rank = match algorithm {
            DispatchAlgorithm::Sequential => chunk * ranks / chunks,
            _ => {
                let turn = chunk % (2 * ranks);
                turn.min(2 * ranks - 1 - turn)
            }
        };
        rank_chunks[rank].push(chunk as u32);
    }
    Dispatch::new(seqlen, chunk_size, rank_chunks)
}

pub(crate) fn dispatch_self(mask: &Mask, config: &PlanConfig) -> Dispatch {
    dispatch_queries(mask, config)
}

pub(crate) fn dispatch_queries(mask: &Mask, config: &PlanConfig) -> Dispatch {
    let seqlen = mask.seqlen_q();
    spread(seqlen, chunk_size(seqlen, config), config.topology.world_size, config.dispatch)
}

pub(crate) fn dispatch_keys(mask: &Mask, config: &PlanConfig, _queries: &Dispatch) -> Dispatch {
    let seqlen = mask.seqlen_k();
    spread(seqlen, chunk_size(seqlen, config), config.topology.world_size, DispatchAlgorithm::Sequential)
}
