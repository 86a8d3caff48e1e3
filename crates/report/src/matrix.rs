use counterpoint_plan::Plan;

/// Key rows that the forward moves between ranks, by owner and receiver.
///
/// Sparse: most pairs of a good plan exchange nothing, and 4,096 ranks would make 16 million entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommMatrix {
    world_size: usize,
    /// (owner, receiver, rows), ascending, no pair twice, no zero.
    entries: Vec<(usize, usize, u64)>,
}

impl CommMatrix {
    /// The group-casts of all forward stages of `plan`.
    pub fn forward(plan: &Plan) -> Self {
        let world_size = plan.ranks.len();
        let mut entries = Vec::new();
        for rank in &plan.ranks {
            let mut rows = std::collections::BTreeMap::<usize, u64>::new();
            for split in rank.forward.iter().flat_map(|stage| &stage.part.remote) {
                *rows.entry(split.rank as usize).or_default() += split.rows.len() as u64;
            }
            entries.extend(rows.into_iter().filter(|&(_, n)| n > 0).map(|(owner, n)| (owner, rank.rank, n)));
        }
        entries.sort_unstable();
        Self { world_size, entries }
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// (owner, receiver, rows) of every pair that exchanges rows, ascending.
    pub fn entries(&self) -> &[(usize, usize, u64)] {
        &self.entries
    }

    /// Rows received by all ranks together.
    pub fn total(&self) -> u64 {
        self.entries.iter().map(|&(_, _, rows)| rows).sum()
    }

    /// Rows that each rank receives.
    pub fn received(&self) -> Vec<u64> {
        let mut out = vec![0; self.world_size];
        self.entries.iter().for_each(|&(_, receiver, rows)| out[receiver] += rows);
        out
    }

    /// Rows that each rank sends, counted once per receiver.
    pub fn sent(&self) -> Vec<u64> {
        let mut out = vec![0; self.world_size];
        self.entries.iter().for_each(|&(owner, _, rows)| out[owner] += rows);
        out
    }

    /// The same matrix with `ranks_per_cell` neighbouring ranks taken together on both axes: sums of rows.
    pub(crate) fn grouped(&self, ranks_per_cell: usize) -> Self {
        let mut cells = std::collections::BTreeMap::<(usize, usize), u64>::new();
        for &(owner, receiver, rows) in &self.entries {
            *cells.entry((owner / ranks_per_cell, receiver / ranks_per_cell)).or_default() += rows;
        }
        Self {
            world_size: self.world_size.div_ceil(ranks_per_cell),
            entries: cells.into_iter().map(|((owner, receiver), rows)| (owner, receiver, rows)).collect(),
        }
    }
}
