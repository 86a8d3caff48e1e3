//! What ranks send and receive in stages, inside nodes and between them, counted for many cuts without making their exchange.

use counterpoint_mask::Range;
use counterpoint_plan::{RankOutline, Runs, Topology};

use super::profile::Profile;
use crate::closed_form::LinkRows;

/// Who receives which rows, cell by cell of every rank's list, so that what a stage sends can be counted for many cuts.
pub(crate) struct Traffic<'a> {
    runs: &'a Runs,
    /// Where pieces of the ranks' lists begin and end, ascending by row. A piece lies in one remote range and one cell.
    ends: Vec<End>,
    /// The node of each rank.
    nodes: Vec<usize>,
    num_nodes: usize,
    /// By rank: rows received from other nodes before each of its profile's places.
    inter_node_before: Vec<Vec<u64>>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    row: usize,
    rank: u32,
    cell: u16,
    begins: bool,
}

impl<'a> Traffic<'a> {
    pub(crate) fn new(
        ranks: &[RankOutline],
        profiles: &[Profile],
        runs: &'a Runs,
        topology: &Topology,
    ) -> Self {
        let mut ends = Vec::new();
        for (rank, (outline, profile)) in ranks.iter().zip(profiles).enumerate() {
            let mut add = |rows: Range, cell: usize| {
                let end = |row, begins| End { row, rank: rank as u32, cell: cell as u16, begins };
                ends.extend([end(rows.start, true), end(rows.end, false)]);
            };
            let (mut place, mut cell) = (0, 0);
            for range in outline.remote.ranges() {
                let mut rows = *range;
                // Places that lie inside of the range cut it.
                while profile.places[cell + 1] < place + rows.len() {
                    let split = rows.start + (profile.places[cell + 1] - place);
                    if split > rows.start {
                        add(Range::new(rows.start, split), cell);
                    }
                    (rows.start, place) = (split, profile.places[cell + 1]);
                    cell += 1;
                }
                add(rows, cell);
                place += rows.len();
            }
        }
        ends.sort_unstable_by_key(|end| end.row);
        let nodes: Vec<usize> = (0..ranks.len()).map(|rank| topology.node(rank)).collect();
        let mut traffic =
            Self { runs, ends, nodes, num_nodes: topology.nodes(), inter_node_before: Vec::new() };
        traffic.inter_node_before = traffic.count_inter_node(profiles);
        traffic
    }

    /// A cell's rows less those of its rank's own node. Of these there are as many as rows of the node have gone by
    /// between the ends of the cell's pieces.
    fn count_inter_node(&self, profiles: &[Profile]) -> Vec<Vec<u64>> {
        let mut inter_node: Vec<Vec<u64>> = profiles
            .iter()
            .map(|profile| profile.places.windows(2).map(|cell| (cell[1] - cell[0]) as u64).collect())
            .collect();
        let mut passed = vec![0_u64; self.num_nodes];
        let mut ends = self.ends.iter().peekable();
        let mut count = |end: &End, passed: u64| {
            let rows = &mut inter_node[end.rank as usize][end.cell as usize];
            *rows = if end.begins { rows.wrapping_add(passed) } else { rows.wrapping_sub(passed) };
        };
        for run in self.runs.all() {
            let node = self.nodes[run.rank as usize];
            while let Some(end) = ends.next_if(|end| end.row < run.range.end) {
                let here = self.nodes[end.rank as usize];
                let inside = if here == node { (end.row - run.range.start) as u64 } else { 0 };
                count(end, passed[here] + inside);
            }
            passed[node] += run.range.len() as u64;
        }
        // Pieces that end with the sequence.
        ends.for_each(|end| count(end, passed[self.nodes[end.rank as usize]]));
        let before = |cells: Vec<u64>| {
            let mut sum = 0;
            std::iter::once(0)
                .chain(cells.into_iter().map(|rows| {
                    sum += rows;
                    sum
                }))
                .collect()
        };
        inter_node.into_iter().map(before).collect()
    }

    /// Rows that `rank` receives from other nodes over all stages.
    pub(crate) fn inter_node(&self, rank: usize) -> u64 {
        self.inter_node_before[rank].last().copied().unwrap_or(0)
    }

    /// What `rank` receives between two places of its profile.
    pub(crate) fn received(&self, rank: usize, profile: &Profile, from: usize, to: usize) -> LinkRows {
        let rows = (profile.places[to] - profile.places[from]) as u64;
        let far = self.inter_node_before[rank][to] - self.inter_node_before[rank][from];
        LinkRows { near: rows - far, far }
    }

    /// What each rank sends in each of `stages` remote stages, `[rank * stages + stage]`; a row counts once for every
    /// rank that it goes to. `stage_of[rank][cell]` is the stage in which the rank receives the cell.
    ///
    /// One pass over the ends and the owners' runs. A stage's rows are counted only where its receivers change.
    pub(crate) fn sent(&self, stage_of: &[Vec<u8>], stages: usize) -> Vec<LinkRows> {
        let mut sent = vec![LinkRows::default(); self.nodes.len() * stages];
        // By stage: up to which row it is counted, and how many ranks receive that row now, in all and in each node.
        let mut counted = vec![0_usize; stages];
        let mut receivers = vec![0_i64; stages];
        let mut node_receivers = vec![0_i64; stages * self.num_nodes];
        let mut ends = self.ends.iter().peekable();
        for run in self.runs.all() {
            let (owner, node) = (run.rank as usize, self.nodes[run.rank as usize]);
            let mut count = |stage: usize, until: usize, receivers: i64, near: i64| {
                let rows = (until - counted[stage]) as u64;
                counted[stage] = until;
                sent[owner * stages + stage].near += rows * near as u64;
                sent[owner * stages + stage].far += rows * (receivers - near) as u64;
            };
            while let Some(end) = ends.next_if(|end| end.row < run.range.end) {
                let stage = usize::from(stage_of[end.rank as usize][end.cell as usize]);
                let nodes = &mut node_receivers[stage * self.num_nodes..(stage + 1) * self.num_nodes];
                // Ends at one row come in any order, so a count may be below 0, but then no row goes by.
                count(stage, end.row, receivers[stage], nodes[node]);
                let step = if end.begins { 1 } else { -1 };
                receivers[stage] += step;
                nodes[self.nodes[end.rank as usize]] += step;
            }
            for (stage, &receivers) in receivers.iter().enumerate() {
                count(stage, run.range.end, receivers, node_receivers[stage * self.num_nodes + node]);
            }
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use counterpoint_plan::{Dispatch, RowList};

    proptest! {
        #[test]
        fn counts_every_row(
            owners in proptest::collection::vec(0..5_usize, 1..60),
            needs in proptest::collection::vec((0..500_usize, 0..500_usize), 5),
            ranks_per_node in 1..6_usize,
            stage_of in proptest::collection::vec(proptest::collection::vec(0..3_u8, 4), 5),
        ) {
            let (ranks, chunk_size, stages) = (5, 7, 3);
            let seqlen = owners.len() * chunk_size - 3;
            let mut rank_chunks = vec![Vec::new(); ranks];
            owners.iter().enumerate().for_each(|(chunk, &rank)| rank_chunks[rank].push(chunk as u32));
            let dispatch = Dispatch::new(seqlen, chunk_size, rank_chunks);
            let runs = Runs::new(&dispatch);
            let topology = Topology { world_size: ranks, ranks_per_node };
            let outlines: Vec<RankOutline> = needs
                .iter()
                .enumerate()
                .map(|(rank, &(a, b))| {
                    let need = Range::new(a.min(b).min(seqlen), a.max(b).min(seqlen));
                    let need = if need.is_empty() { Vec::new() } else { vec![need] };
                    let own = dispatch.ranges(rank);
                    let remote = RowList::new(Range::without(&need, &own));
                    RankOutline { own, q_rows: 0, work: Vec::new(), remote, hosted: None }
                })
                .collect();
            let profiles: Vec<Profile> = outlines.iter().map(|outline| Profile::new(outline, &runs, 4)).collect();
            let traffic = Traffic::new(&outlines, &profiles, &runs, &topology);
            let mut sent = vec![LinkRows::default(); ranks * stages];
            for (rank, (outline, profile)) in outlines.iter().zip(&profiles).enumerate() {
                let mut inter_node = 0;
                for (cell, places) in profile.places.windows(2).enumerate() {
                    let mut received = LinkRows::default();
                    for row in outline.remote.rows(places[0], places[1]).iter().flat_map(|range| range.start..range.end) {
                        let owner = owners[row / chunk_size];
                        let sent = &mut sent[owner * stages + usize::from(stage_of[rank][cell])];
                        match topology.node(owner) == topology.node(rank) {
                            true => (sent.near, received.near) = (sent.near + 1, received.near + 1),
                            false => (sent.far, received.far) = (sent.far + 1, received.far + 1),
                        }
                    }
                    prop_assert_eq!(traffic.received(rank, profile, cell, cell + 1), received);
                    inter_node += received.far;
                }
                prop_assert_eq!(traffic.inter_node(rank), inter_node);
            }
            prop_assert_eq!(traffic.sent(&stage_of, stages), sent);
        }
    }
}
