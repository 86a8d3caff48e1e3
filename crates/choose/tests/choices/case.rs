//! Random problems of attention, from a seed: ranks, nodes, masks of every kind and lengths as they are trained with.

use counterpoint_choose::PlanConfig;
use counterpoint_cost::{CostModel, MachineProfile};
use counterpoint_mask::{AttnSlice, Documents, Mask, MaskPreset, MaskType, Range, Window};
use counterpoint_plan::{AttentionSpec, DType, Topology};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Of all sets of cases.
pub(crate) const SEED: u64 = 20_261_124;

/// One problem.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) mask: Mask,
    pub(crate) spec: AttentionSpec,
    pub(crate) config: PlanConfig,
}

/// How large cases are.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) most_ranks: usize,
    pub(crate) most_tokens: usize,
}

/// The costs of GPUs as they are shipped.
pub(crate) fn cost() -> CostModel {
    MachineProfile::h200().cost
}

impl Case {
    pub(crate) fn random(seed: u64, index: u64, sizes: Sizes) -> Self {
        Self::with(seed, index, sizes, mask)
    }

    /// Some of whose rows see the keys of all ranks, and the others few.
    pub(crate) fn with_wide_rows(seed: u64, index: u64, sizes: Sizes) -> Self {
        Self::with(seed, index, sizes, wide_rows)
    }

    fn with(
        seed: u64,
        index: u64,
        sizes: Sizes,
        mask: impl FnOnce(usize, &mut ChaCha8Rng) -> (&'static str, Mask),
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ index << 32);
        let rng = &mut rng;
        let most = sizes.most_ranks.ilog2();
        let ranks = 1 << rng.random_range(1..=most);
        let ranks_per_node =
            if rng.random_range(0..2) == 0 { ranks } else { (ranks / (1 << rng.random_range(0..4))).max(1) };
        let tokens = (1usize << rng.random_range(10..=sizes.most_tokens.ilog2()))
            + if rng.random_range(0..4) == 0 { 128 * rng.random_range(0..8) } else { 0 };
        let (kind, mask) = mask(tokens, rng);
        let heads = [(64, 8), (32, 8), (16, 16), (8, 1)][rng.random_range(0..4)];
        let head_dim = [64, 128, 128][rng.random_range(0..3)];
        let spec = AttentionSpec::new(heads.0, heads.1, head_dim, DType::Bf16);
        let topology = Topology { world_size: ranks, ranks_per_node };
        let config = PlanConfig { topology, cost: cost(), ..PlanConfig::new(ranks) };
        let name = format!(
            "case {index}: {kind} of {tokens} on {ranks} ranks of {} nodes, {}:{} of {head_dim}",
            topology.nodes(),
            heads.0,
            heads.1
        );
        Self { name, mask, spec, config }
    }
}

/// A last global block, global tokens, few queries over many keys; or some of these among rows that see a window of the keys.
fn wide_rows(tokens: usize, rng: &mut ChaCha8Rng) -> (&'static str, Mask) {
    let rows = (1usize << rng.random_range(3..=10)).min(tokens / 4);
    let far = tokens / (1 << rng.random_range(3..7));
    match rng.random_range(0..4) {
        0 => ("last global block", Mask::last_global(documents(tokens - rows, rng), far, rows).unwrap()),
        1 => {
            let window = Window { left: Some(far), right: Some(0), global: rows };
            ("global tokens", Mask::sliding_window(tokens, window).unwrap())
        }
        2 => ("few queries", Mask::cross_full(rows, tokens).unwrap()),
        _ => {
            let queries = tokens / 2;
            let slice = |q: Range, k: Range| AttnSlice::new(q, k, MaskType::Full);
            let mut slices = vec![slice(Range::new(0, rows), Range::new(0, tokens))];
            slices.extend((rows..queries).step_by(far.max(1)).map(|start| {
                let end = (start + far.max(1)).min(queries);
                slice(Range::new(start, end), Range::new(2 * start, 2 * end))
            }));
            ("few queries among others", Mask::new(queries, tokens, slices).unwrap())
        }
    }
}

fn documents(tokens: usize, rng: &mut impl Rng) -> Documents {
    let mean = 2_f64.powf(rng.random_range(7.0..14.0));
    let mut lengths = Vec::new();
    let mut left = tokens;
    while left > 0 {
        // Heavy-tailed, as packed documents are.
        let length = (mean * (1.0 / rng.random_range(0.02..1.0_f64)).powf(0.8) / 2.0) as usize;
        lengths.push(length.clamp(1, left));
        left -= lengths[lengths.len() - 1];
    }
    Documents::from_lengths(lengths).unwrap()
}

fn preset(preset: MaskPreset, tokens: usize) -> (&'static str, Mask) {
    (preset.name(), preset.build(tokens).unwrap())
}

fn mask(tokens: usize, rng: &mut impl Rng) -> (&'static str, Mask) {
    match rng.random_range(0..13) {
        0 => ("full", Mask::full(tokens).unwrap()),
        1 | 2 => ("causal", Mask::causal(tokens).unwrap()),
        3 => ("varlen full", Mask::full(documents(tokens, rng)).unwrap()),
        4 | 5 => ("varlen causal", Mask::causal(documents(tokens, rng)).unwrap()),
        6 => {
            let window =
                Window { left: Some(tokens / (1 << rng.random_range(1..6))), right: Some(0), global: 0 };
            ("sliding window", Mask::sliding_window(tokens, window).unwrap())
        }
        7 => {
            let window = Window { left: Some(tokens / 16), right: Some(0), global: 64 };
            ("sliding window with global tokens", Mask::sliding_window(tokens, window).unwrap())
        }
        8 => (
            "block causal",
            Mask::block_causal(tokens, (tokens / (1 << rng.random_range(2..6))).max(64)).unwrap(),
        ),
        9 => preset(MaskPreset::BlockCausalLastGlobal, tokens),
        10 => preset(MaskPreset::SharedQuestion, tokens),
        11 => preset(MaskPreset::BlockSparse, tokens),
        _ => ("varlen block causal", Mask::block_causal(documents(tokens, rng), 2048.min(tokens)).unwrap()),
    }
}
