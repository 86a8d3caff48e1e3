//! What `--device` and `--exchange` name.

use clap::ValueEnum;

/// How rows cross between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Exchange {
    /// Once to each node that needs them, then inside it; sums of gradients the other way round
    TwoLevel,
    /// To every rank that needs them
    Flat,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// Ranks are threads of this process
    Cpu,
    /// Ranks are on GPUs: one each, or dealt round-robin where there are fewer
    Cuda,
}
