//! Ranks, tokens and heads of `bench cp`, with the defaults of CPUs and GPUs.

use counterpoint_console::arguments::Device;

use crate::arguments::BenchCpArguments;

/// What is measured: what was asked for, and defaults for the rest.
pub(super) struct Sizes {
    pub(super) cp_size: usize,
    pub(super) tokens: Vec<usize>,
    pub(super) heads: (usize, usize),
    pub(super) head_dim: usize,
}

impl Sizes {
    /// `gpus` are there.
    pub(super) fn of(arguments: &BenchCpArguments, gpus: usize) -> Self {
        let (cp_size, tokens, heads, head_dim): (_, &[usize], _, _) = match arguments.device {
            Device::Cpu => (2, &[1 << 10], (4, 2), 64),
            Device::Cuda => (gpus.max(2), &[8 << 10, 16 << 10, 32 << 10], (64, 8), 128),
        };
        Self {
            cp_size: arguments.cp_size.unwrap_or(cp_size),
            tokens: if arguments.tokens.is_empty() { tokens.to_vec() } else { arguments.tokens.clone() },
            heads: arguments.heads.unwrap_or(heads),
            head_dim: arguments.head_dim.unwrap_or(head_dim),
        }
    }
}
