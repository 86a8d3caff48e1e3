//! Random group collectives for the selftest, whose splits are empty, go to many ranks or none, and arrive in any order.

use counterpoint_mask::Range;
use counterpoint_plan::{GroupPart, OwnedSplit, RemoteSplit};

use crate::draw::Draw;

/// Every rank's part in a group collective, with the rows of its two tensors.
pub(super) struct Pattern {
    pub(super) parts: Vec<GroupPart>,
    pub(super) owned_rows: Vec<usize>,
    pub(super) remote_rows: Vec<usize>,
}

impl Pattern {
    /// Splits in random places, some without rows, with random destinations (none, some, all, the rank itself), received in a
    /// random order with gaps between them. Some ranks own nothing.
    pub(super) fn random(draw: &mut Draw, world_size: usize, most_rows: usize) -> Self {
        let mut parts = vec![GroupPart::default(); world_size];
        let owned_rows: Vec<usize> =
            (0..world_size).map(|_| if draw.chance(12) { 0 } else { draw.below(most_rows) }).collect();
        for (part, &rows) in parts.iter_mut().zip(&owned_rows) {
            let mut start = 0;
            while start < rows {
                let length = if draw.chance(10) { 0 } else { draw.sized(1, most_rows) };
                let end = start + length.min(rows - start);
                let percent = draw.below(120);
                let ranks = (0..world_size as u32).filter(|_| draw.chance(percent)).collect();
                part.owned.push(OwnedSplit { rows: Range::new(start, end), ranks });
                start = end + draw.below(3);
            }
        }
        let mut remote_rows = vec![0; world_size];
        for rank in 0..world_size {
            // Splits of one source keep their order; those of different sources are mixed.
            let mut waiting: Vec<(u32, Vec<usize>)> = Vec::new();
            for (source, part) in parts.iter().enumerate() {
                let sent = part.owned.iter().filter(|split| split.ranks.contains(&(rank as u32)));
                let lengths: Vec<usize> = sent.map(|split| split.rows.len()).rev().collect();
                waiting.push((source as u32, lengths));
            }
            waiting.retain(|(_, lengths)| !lengths.is_empty());
            while !waiting.is_empty() {
                let at = draw.below(waiting.len());
                let (source, lengths) = &mut waiting[at];
                let Some(length) = lengths.pop() else { break };
                let start = remote_rows[rank] + draw.below(3);
                let rows = Range::new(start, start + length);
                parts[rank].remote.push(RemoteSplit { rows, rank: *source });
                remote_rows[rank] = rows.end;
                waiting.retain(|(_, lengths)| !lengths.is_empty());
            }
        }
        Self { parts, owned_rows, remote_rows }
    }
}
