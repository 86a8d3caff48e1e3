//! The communication matrix as the entries that are not zero, and coarser where ranks are too many to draw.

use counterpoint_plan::Plan;

/// Key rows that the forward moves between ranks, by owner and receiver.
///
/// Sparse, unlike [`Plan::communication_matrix`]: most pairs of a good plan exchange nothing, and 4,096 ranks would make
/// 16 million entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommMatrix {
    /// (owner, receiver, rows), ascending, no pair twice, no zero.
    entries: Vec<(usize, usize, u64)>,
}

impl CommMatrix {
    /// The group-casts of all forward stages of `plan`.
    pub(crate) fn forward(plan: &Plan) -> Self {
        let mut entries = Vec::new();
        for rank in &plan.ranks {
            let mut rows = std::collections::BTreeMap::<usize, u64>::new();
            for split in rank.forward.iter().flat_map(|stage| &stage.part.remote) {
                *rows.entry(split.rank as usize).or_default() += split.rows.len() as u64;
            }
            entries.extend(rows.into_iter().filter(|&(_, n)| n > 0).map(|(owner, n)| (owner, rank.rank, n)));
        }
        entries.sort_unstable();
        Self { entries }
    }

    /// (owner, receiver, rows) of every pair that exchanges rows, ascending.
    pub(crate) fn entries(&self) -> &[(usize, usize, u64)] {
        &self.entries
    }

    /// The same matrix with `ranks_per_cell` neighbouring ranks taken together on both axes: sums of rows.
    pub(crate) fn grouped(&self, ranks_per_cell: usize) -> Self {
        let mut cells = std::collections::BTreeMap::<(usize, usize), u64>::new();
        for &(owner, receiver, rows) in &self.entries {
            *cells.entry((owner / ranks_per_cell, receiver / ranks_per_cell)).or_default() += rows;
        }
        Self { entries: cells.into_iter().map(|((owner, receiver), rows)| (owner, receiver, rows)).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use counterpoint_choose::{PlanConfig, plan_mask};
    use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
    use counterpoint_plan::{AttentionSpec, DType, GradientShares};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entries_are_those_of_the_dense_matrix(
            cp_size in 1usize..12,
            chunk_size in 1usize..40,
            lengths in prop::collection::vec(1usize..90, 1..6),
            ranks_per_cell in 1usize..5,
        ) {
            let (mut start, mut slices) = (0, Vec::new());
            for length in lengths {
                let own = Range::new(start, start + length);
                slices.push(AttnSlice::new(own, own, MaskType::Causal));
                start += length;
            }
            let mask = Mask::new(start, start, slices).unwrap();
            let spec = AttentionSpec {
                heads_q: 1, heads_kv: 1, head_dim: 8, head_dim_v: 8, dtype: DType::F32, scale: 1.0, softcap: 0.0, seqlen_sink: 0,
                gradient_shares: GradientShares::Accumulators,
                max_logits: false,
                dlse: false,
            };
            let config = PlanConfig { chunk_size: Some(chunk_size), ..PlanConfig::new(cp_size) };
            let plan = plan_mask(&mask, &spec, &config).unwrap();
            let dense = plan.communication_matrix();
            let matrix = CommMatrix::forward(&plan);
            let grouped = matrix.grouped(ranks_per_cell);
            let (mut from_entries, mut of_cells) = (vec![0; dense.len()], vec![0; dense.len()]);
            for &(owner, receiver, rows) in matrix.entries() {
                prop_assert!(rows > 0);
                from_entries[owner * cp_size + receiver] += rows;
            }
            prop_assert_eq!(&from_entries, &dense);
            for &(owner, receiver, rows) in grouped.entries() {
                of_cells[owner * cp_size + receiver] += rows;
            }
            for (index, rows) in dense.into_iter().enumerate() {
                let cell = index / cp_size / ranks_per_cell * cp_size + index % cp_size / ranks_per_cell;
                of_cells[cell] -= rows;
            }
            prop_assert!(of_cells.iter().all(|&rest| rest == 0));
        }
    }
}
