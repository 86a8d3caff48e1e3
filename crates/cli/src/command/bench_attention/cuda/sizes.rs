use clap::ValueEnum;

use crate::arguments::{
    BenchAttentionArguments, BenchClock, BenchDType, BenchMask, BenchPass, CudaBenchArguments,
};

/// What is measured: what was asked for, and defaults for the rest.
pub(super) struct Sizes {
    pub(super) masks: Vec<BenchMask>,
    pub(super) seqlens: Vec<usize>,
    pub(super) heads: Vec<(usize, usize)>,
    pub(super) head_dim: usize,
    pub(super) dtype: BenchDType,
    pub(super) passes: Vec<BenchPass>,
    pub(super) iterations: usize,
    pub(super) clock: BenchClock,
}

impl Sizes {
    pub(super) fn of(arguments: &BenchAttentionArguments) -> Self {
        let CudaBenchArguments { masks, seqlens, heads, head_dim, dtype, passes, iterations, clock, .. } =
            &arguments.cuda;
        let quick = arguments.quick;
        let clock = clock.unwrap_or(BenchClock::Device);
        let (default_seqlens, default_heads): (&[usize], &[(usize, usize)]) = match (clock, quick) {
            (_, true) => (&[8 << 10], &[(16, 16)]),
            (BenchClock::Wall, false) => (&[1 << 10, 2 << 10, 4 << 10], &[(16, 16), (64, 8)]),
            (BenchClock::Device, false) => (&[8 << 10, 16 << 10, 32 << 10], &[(16, 16), (64, 8)]),
        };
        Self {
            masks: given_or(masks, BenchMask::value_variants()),
            seqlens: given_or(seqlens, default_seqlens),
            heads: given_or(heads, default_heads),
            head_dim: head_dim.unwrap_or(128),
            dtype: dtype.unwrap_or(BenchDType::Bf16),
            passes: given_or(passes, BenchPass::value_variants()),
            iterations: iterations.map_or(if quick { 4 } else { 12 }, |n| n as usize),
            clock,
        }
    }
}

fn given_or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}
