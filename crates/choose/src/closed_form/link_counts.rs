//! What ranks send and receive in every stage, counted without writing down who gets which piece.

use counterpoint_plan::{Runs, StageCuts, Topology};

use super::link_rows::LinkRows;

/// Rows through every rank's links, by rank and stage.
pub(crate) struct LinkCounts {
    stages: usize,
    sent: Vec<LinkRows>,
    received: Vec<LinkRows>,
}

/// Where a range that a rank receives begins or ends.
struct End {
    row: usize,
    rank: u32,
    begins: bool,
}

impl LinkCounts {
    /// Of stages cut like this.
    pub(crate) fn new(runs: &Runs, cuts: &StageCuts, ranks: usize, topology: &Topology) -> Self {
        let zeros = || vec![LinkRows::default(); ranks * cuts.stages()];
        let mut counts = Self { stages: cuts.stages(), sent: zeros(), received: zeros() };
        for stage in 1..cuts.stages() {
            let mut ends: Vec<End> = Vec::new();
            for rank in 0..ranks {
                for range in cuts.rows(rank, stage) {
                    let end = |row, begins| End { row, rank: rank as u32, begins };
                    ends.extend([end(range.start, true), end(range.end, false)]);
                }
            }
            ends.sort_unstable_by_key(|end| end.row);
            counts.count(runs, stage, &ends, topology);
        }
        counts
    }

    /// One pass over the ends and the owners' runs: between two ends the number of receivers stands still.
    fn count(&mut self, runs: &Runs, stage: usize, ends: &[End], topology: &Topology) {
        let stages = self.stages;
        let (mut receivers, mut counted) = (0_i64, 0);
        let mut node_receivers = vec![0_i64; topology.nodes()];
        // Rows that each node owns of those counted.
        let mut owned = vec![0_u64; topology.nodes()];
        let mut ends = ends.iter().peekable();
        let mut pass = |end: &End, owned: &[u64], receivers: &mut i64, node_receivers: &mut [i64]| {
            let node = topology.node(end.rank as usize);
            let step = if end.begins { 1 } else { -1 };
            *receivers += step;
            node_receivers[node] += step;
            // A range has as many rows of its rank's node as went by between its ends.
            let rows = &mut self.received[end.rank as usize * stages + stage];
            let add = |sum: &mut u64, rows: u64| {
                *sum = if end.begins { sum.wrapping_sub(rows) } else { sum.wrapping_add(rows) };
            };
            add(&mut rows.near, owned[node]);
            add(&mut rows.far, (end.row as u64).wrapping_sub(owned[node]));
        };
        for run in runs.all() {
            let (rank, node) = (run.rank as usize, topology.node(run.rank as usize));
            let sent = &mut self.sent[rank * stages + stage];
            let mut advance = |until: usize, receivers: i64, near: i64, owned: &mut [u64]| {
                let rows = (until - counted) as u64;
                sent.near += rows * near as u64;
                sent.far += rows * (receivers - near) as u64;
                owned[node] += rows;
                counted = until;
            };
            while let Some(end) = ends.next_if(|end| end.row < run.range.end) {
                advance(end.row, receivers, node_receivers[node], &mut owned);
                pass(end, &owned, &mut receivers, &mut node_receivers);
            }
            advance(run.range.end, receivers, node_receivers[node], &mut owned);
        }
        ends.for_each(|end| pass(end, &owned, &mut receivers, &mut node_receivers));
    }

    /// What `rank` sends in a stage; a row counts once for every rank that it goes to.
    pub(crate) fn sent(&self, rank: usize, stage: usize) -> LinkRows {
        self.sent[rank * self.stages + stage]
    }

    /// What it receives.
    pub(crate) fn received(&self, rank: usize, stage: usize) -> LinkRows {
        self.received[rank * self.stages + stage]
    }

    /// The busier direction of its links.
    pub(crate) fn busier(&self, rank: usize, stage: usize) -> LinkRows {
        LinkRows::busier(self.sent(rank, stage), self.received(rank, stage))
    }
}
