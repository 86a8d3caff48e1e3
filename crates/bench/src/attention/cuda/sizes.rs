//! Masks, lengths, heads and clocks of `bench attention --device cuda`, with the defaults of each clock.

use crate::gpu::{BenchClock as Clock, BenchPass as Pass, CALLS};
use clap::ValueEnum;
use counterpoint_mask::MaskPreset;
use counterpoint_plan::DType;

use crate::arguments::{
    BenchAttentionArguments, BenchClock, BenchDType, BenchKernels, BenchPass, CudaBenchArguments,
};

/// What is measured: what was asked for, and defaults for the rest.
pub(super) struct Sizes {
    pub(super) masks: Vec<MaskPreset>,
    pub(super) seqlens: Vec<usize>,
    pub(super) heads: Vec<(usize, usize)>,
    pub(super) head_dim: usize,
    pub(super) dtype: BenchDType,
    pub(super) passes: Vec<BenchPass>,
    pub(super) iterations: usize,
    pub(super) clock: BenchClock,
    pub(super) kernels: BenchKernels,
}

impl Sizes {
    pub(super) fn of(arguments: &BenchAttentionArguments) -> Self {
        let CudaBenchArguments {
            masks,
            seqlens,
            heads,
            head_dim,
            dtype,
            passes,
            iterations,
            clock,
            kernels,
            ..
        } = &arguments.cuda;
        let quick = arguments.quick;
        let clock = clock.unwrap_or(BenchClock::Device);
        let (default_seqlens, default_heads): (&[usize], &[(usize, usize)]) = match (clock, quick) {
            (_, true) => (&[8 << 10], &[(16, 16)]),
            (BenchClock::Wall | BenchClock::Graph, false) => {
                (&[1 << 10, 2 << 10, 4 << 10], &[(16, 16), (64, 8)])
            }
            (BenchClock::Device, false) => (&[8 << 10, 16 << 10, 32 << 10], &[(16, 16), (64, 8)]),
        };
        Self {
            masks: given_or(masks, &MaskPreset::ALL),
            seqlens: given_or(seqlens, default_seqlens),
            heads: given_or(heads, default_heads),
            head_dim: head_dim.unwrap_or(128),
            dtype: dtype.unwrap_or(BenchDType::Bf16),
            passes: given_or(passes, BenchPass::value_variants()),
            iterations: iterations.map_or(if quick { 4 } else { 12 }, |n| n as usize),
            clock,
            kernels: kernels.unwrap_or(BenchKernels::Native),
        }
    }
}

impl Sizes {
    pub(super) fn element(&self) -> DType {
        match self.dtype {
            BenchDType::Bf16 => DType::Bf16,
            BenchDType::F16 => DType::F16,
        }
    }

    pub(super) fn timed(&self) -> Vec<Pass> {
        let pass = |pass: &BenchPass| match pass {
            BenchPass::Forward => Pass::Forward,
            BenchPass::Backward => Pass::Backward,
            BenchPass::Deterministic => Pass::Deterministic,
        };
        self.passes.iter().map(pass).collect()
    }

    pub(super) fn by(&self) -> Clock {
        match self.clock {
            BenchClock::Device => Clock::Device,
            BenchClock::Wall => Clock::Wall,
            BenchClock::Graph => Clock::Graph,
        }
    }

    /// How times were taken, for a title.
    pub(super) fn clock_text(&self) -> String {
        match self.clock {
            BenchClock::Device => "by the device's clock".to_owned(),
            BenchClock::Wall => format!("by the host's clock, {CALLS} runs at a time, launches included"),
            BenchClock::Graph => format!("by the host's clock, {CALLS} replays of a graph at a time"),
        }
    }
}

fn given_or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}
