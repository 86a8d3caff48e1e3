use crate::Topology;
use crate::outline::RankOutline;
use crate::runs::Runs;

/// Rows that each rank moves, over all stages together.
pub(crate) struct Traffic {
    /// Rows sent, each counted once per destination.
    pub(crate) sent: Vec<u64>,
    /// Rows received from other nodes.
    pub(crate) crossing: Vec<u64>,
}

impl Traffic {
    /// One pass over the runs and the ends of all remote ranges: how many ranks receive the current row, and how many rows
    /// of each node have gone by.
    pub(crate) fn new(ranks: &[RankOutline], runs: &Runs, topology: &Topology) -> Self {
        let mut ends: Vec<(usize, u32, i64)> = Vec::new();
        for (rank, outline) in ranks.iter().enumerate() {
            for range in &outline.remote.ranges {
                ends.push((range.start, rank as u32, 1));
                ends.push((range.end, rank as u32, -1));
            }
        }
        ends.sort_unstable_by_key(|&(row, ..)| row);
        let mut sent = vec![0_u64; ranks.len()];
        let mut passed = vec![0_u64; topology.nodes()];
        let mut crossing: Vec<u64> = ranks.iter().map(|outline| outline.remote.len() as u64).collect();
        let mut receivers = 0_i64;
        let mut ends = ends.into_iter().peekable();
        for run in runs.all() {
            let (owner, node) = (run.rank as usize, topology.node(run.rank as usize));
            let mut row = run.range.start;
            let mut pass = |until: usize, receivers: i64, passed: &mut [u64]| {
                sent[owner] += (until - row) as u64 * receivers as u64;
                passed[node] += (until - row) as u64;
                row = until;
            };
            while let Some((at, rank, step)) = ends.next_if(|&(at, ..)| at < run.range.end) {
                pass(at, receivers, &mut passed);
                receivers += step;
                // Rows of the receiver's own node within its range do not cross.
                let near = passed[topology.node(rank as usize)];
                let crossing = &mut crossing[rank as usize];
                *crossing = match step {
                    1 => crossing.wrapping_add(near),
                    _ => crossing.wrapping_sub(near),
                };
            }
            pass(run.range.end, receivers, &mut passed);
        }
        for (_, rank, _) in ends {
            // Ranges that end with the sequence.
            let near = passed[topology.node(rank as usize)];
            crossing[rank as usize] = crossing[rank as usize].wrapping_sub(near);
        }
        Self { sent, crossing }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;
    use proptest::prelude::*;

    use super::*;
    use crate::Dispatch;
    use crate::work::{RowList, without};

    proptest! {
        #[test]
        fn counts_every_row(
            owners in proptest::collection::vec(0..5_usize, 1..20),
            needs in proptest::collection::vec((0..100_usize, 0..100_usize), 5),
            ranks_per_node in 1..6_usize,
        ) {
            let (ranks, chunk_size) = (5, 7);
            let seqlen = owners.len() * chunk_size - 3;
            let mut rank_chunks = vec![Vec::new(); ranks];
            owners.iter().enumerate().for_each(|(chunk, &rank)| rank_chunks[rank].push(chunk as u32));
            let dispatch = Dispatch::new(seqlen, chunk_size, rank_chunks);
            let topology = Topology { world_size: ranks, ranks_per_node };
            let outlines: Vec<RankOutline> = needs
                .iter()
                .enumerate()
                .map(|(rank, &(a, b))| {
                    let need = Range::new(a.min(b).min(seqlen), a.max(b).min(seqlen));
                    let need = if need.is_empty() { Vec::new() } else { vec![need] };
                    let own = dispatch.ranges(rank);
                    let remote = RowList::new(without(&need, &own));
                    RankOutline { own, work: Vec::new(), remote }
                })
                .collect();
            let traffic = Traffic::new(&outlines, &Runs::new(&dispatch), &topology);
            let (mut sent, mut crossing) = (vec![0; ranks], vec![0; ranks]);
            for (rank, outline) in outlines.iter().enumerate() {
                for row in outline.remote.ranges.iter().flat_map(|range| range.start..range.end) {
                    let owner = owners[row / chunk_size];
                    sent[owner] += 1;
                    crossing[rank] += u64::from(topology.node(owner) != topology.node(rank));
                }
            }
            prop_assert_eq!(traffic.sent, sent);
            prop_assert_eq!(traffic.crossing, crossing);
        }
    }
}
