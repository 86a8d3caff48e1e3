//! A plan's traffic compared with the lower bound, ring attention, all-gather and Ulysses.

use counterpoint_mask::Mask;
use serde::{Deserialize, Serialize};

use crate::{AttentionSpec, Dispatch, Plan, chunk_work, received_rows_lower_bound};

/// Key rows that all ranks together receive: by this plan, at least by any, and by other ways to distribute attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficBounds {
    /// By this plan.
    pub recv_tokens: u64,
    /// At least, by every dispatch of these chunks that is as balanced as this one: its heaviest rank no heavier, no rank
    /// with more chunks or more key rows, no queries travelling.
    pub lower_bound_tokens: u64,
    /// Ring attention: every key row visits every rank, whatever the mask.
    pub ring_tokens: u64,
    /// All keys gathered on every rank.
    pub all_gather_tokens: u64,
    /// Ulysses: q, k, v and out change from sequence to heads and back; its bytes in rows of k and v. `None` where it does
    /// not work: query heads that do not divide by the number of ranks, or key heads of which neither they nor the ranks
    /// are a multiple of the other.
    pub ulysses_tokens: Option<u64>,
}

impl TrafficBounds {
    /// Bounds of `plan`, which must be a plan for `mask` and `spec`.
    pub fn new(plan: &Plan, mask: &Mask, spec: &AttentionSpec) -> Self {
        let recv_tokens = plan.ranks.iter().map(|rank| rank.recv_rows()).sum();
        Self::of_dispatches(recv_tokens, [&plan.q_dispatch, &plan.k_dispatch], mask, spec)
    }

    /// What each moves over what a ring does, by a name for people: this plan first. `None` of one rank, where nothing travels.
    pub fn of_ring(&self) -> Option<impl Iterator<Item = (&'static str, f64)>> {
        let Self { recv_tokens, lower_bound_tokens, ring_tokens, all_gather_tokens, ulysses_tokens } = *self;
        let all = [
            ("this plan", Some(recv_tokens)),
            ("lower bound", Some(lower_bound_tokens)),
            ("ring", Some(ring_tokens)),
            ("all-gather", Some(all_gather_tokens)),
            ("Ulysses", ulysses_tokens),
        ];
        let of_ring = move |tokens: u64| tokens as f64 / ring_tokens as f64;
        let shares = all.into_iter().filter_map(move |(name, tokens)| Some((name, of_ring(tokens?))));
        (ring_tokens > 0).then_some(shares)
    }

    /// Bounds of a plan with these dispatches of queries and keys, whose ranks receive so many key rows.
    pub fn of_dispatches(
        recv_tokens: u64,
        [q_dispatch, k_dispatch]: [&Dispatch; 2],
        mask: &Mask,
        spec: &AttentionSpec,
    ) -> Self {
        let ranks = q_dispatch.cp_size() as u64;
        let all = (ranks - 1) * mask.seqlen_k() as u64;
        Self {
            recv_tokens,
            lower_bound_tokens: received_rows_lower_bound(
                &chunk_work(mask, q_dispatch.chunk_size()),
                q_dispatch,
                k_dispatch,
            ),
            ring_tokens: all,
            all_gather_tokens: all,
            ulysses_tokens: ulysses(mask, spec, ranks),
        }
    }
}

/// Every rank keeps `1 / ranks` of what it has and exchanges the rest. Where there are fewer key heads than ranks, several
/// ranks receive the same head.
fn ulysses(mask: &Mask, spec: &AttentionSpec, ranks: u64) -> Option<u64> {
    let (heads_q, heads_kv) = (spec.heads_q as u64, spec.heads_kv as u64);
    let shares_keys = heads_kv.is_multiple_of(ranks) || ranks.is_multiple_of(heads_kv);
    if heads_kv == 0 || !heads_q.is_multiple_of(ranks) || !shares_keys {
        return None;
    }
    let kv_heads = heads_kv.max(ranks);
    let heads = mask.seqlen_q() as u64 * heads_q + mask.seqlen_k() as u64 * kv_heads;
    Some((heads as u128 * u128::from(ranks - 1) / u128::from(ranks * heads_kv)) as u64)
}

#[cfg(test)]
mod tests {
    use crate::GradientShares;
    use counterpoint_mask::{AttnSlice, MaskType, Range};
    use proptest::prelude::*;

    use super::*;
    use crate::{DType, Division, MOST_LAYERS, Outline, Owners, Planning, RankOutline, StageCuts, Topology};

    const SPEC: AttentionSpec = AttentionSpec {
        heads_q: 8,
        heads_kv: 2,
        head_dim: 64,
        head_dim_v: 64,
        dtype: DType::Bf16,
        scale: 0.125,
        softcap: 0.0,
        seqlen_sink: 0,
        gradient_shares: GradientShares::Accumulators,
        max_logits: false,
        dlse: false,
    };

    /// Documents one after the other, each seeing itself causally.
    fn documents(lengths: &[usize]) -> Mask {
        let mut start = 0;
        let slices = lengths.iter().map(|length| {
            let range = Range::new(start, start + length);
            start = range.end;
            AttnSlice::new(range, range, MaskType::Causal)
        });
        let slices = slices.collect();
        Mask::new(start, start, slices).unwrap()
    }

    /// A plan in which every rank receives all that it needs in one stage.
    fn plan(mask: &Mask, dispatch: Dispatch) -> Plan {
        let topology = Topology::flat(dispatch.cp_size());
        let division = Division::new(mask, Owners::new(dispatch.clone(), dispatch));
        let (owners, ranks) =
            RankOutline::of(division, &topology, |_, _| MOST_LAYERS, &Planning::ALONE).unwrap();
        let places: Vec<Vec<usize>> = ranks.iter().map(|rank| vec![0, rank.remote.len()]).collect();
        let cuts = StageCuts::new(&ranks, &places, 2);
        Outline { owners, ranks, forward: cuts.clone(), backward: cuts }.into_plan(&Planning::ALONE).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// All dispatches of a few chunks to three ranks: none that keeps the limits of the bound receives less.
        #[test]
        fn no_dispatch_receives_less(
            lengths in proptest::collection::vec(1..40_usize, 1..5), chunk_size in 8..24_usize, picked: usize,
        ) {
            let ranks = 3_usize;
            let mask = documents(&lengths);
            let chunks = mask.seqlen_q().div_ceil(chunk_size).min(6);
            let chunk_size = mask.seqlen_q().div_ceil(chunks);
            let chunks = mask.seqlen_q().div_ceil(chunk_size);
            let plans: Vec<Plan> = (0..ranks.pow(chunks as u32))
                .map(|mut number| {
                    let mut rank_chunks = vec![Vec::new(); ranks];
                    for chunk in 0..chunks {
                        rank_chunks[number % ranks].push(chunk as u32);
                        number /= ranks;
                    }
                    let dispatch = Dispatch::new(mask.seqlen_q(), chunk_size, rank_chunks);
                    plan(&mask, dispatch)
                })
                .collect();
            let limits = |plan: &Plan| {
                let most = |of: &dyn Fn(usize) -> u64| (0..ranks).map(of).max().unwrap();
                [
                    most(&|rank| plan.ranks[rank].area),
                    most(&|rank| plan.q_dispatch.chunks(rank).len() as u64),
                    most(&|rank| plan.k_dispatch.tokens(rank) as u64),
                ]
            };
            let plan = &plans[picked % plans.len()];
            let bounds = TrafficBounds::new(plan, &mask, &SPEC);
            for other in &plans {
                if limits(other).iter().zip(limits(plan)).all(|(theirs, ours)| *theirs <= ours) {
                    let received = other.ranks.iter().map(|rank| rank.recv_rows()).sum::<u64>();
                    prop_assert!(bounds.lower_bound_tokens <= received);
                }
            }
        }
    }

    #[test]
    fn ulysses_needs_heads_that_divide() {
        let mask = documents(&[100]);
        assert_eq!(ulysses(&mask, &SPEC, 3), None);
        let spec = AttentionSpec { heads_q: 12, heads_kv: 4, ..SPEC };
        assert_eq!(ulysses(&mask, &spec, 6), None);
        assert_eq!(ulysses(&mask, &spec, 1), Some(0));
        assert_eq!(ulysses(&mask, &spec, 2), Some(100 * 16 / 4 / 2));
    }
}
