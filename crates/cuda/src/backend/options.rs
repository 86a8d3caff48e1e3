//! Options of a rank for all its runs.

/// Whether a run measures its operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// Every operation, by events around it: what a timeline needs.
    #[default]
    Spans,
    /// Nothing: the fewest calls, for benchmarks of a whole run.
    Off,
}

/// Who computes products of whole matrices in passes in which nothing travels: forwards of column-parallel layers and backwards of
/// row-parallel ones where all tokens are on every rank, layers of one rank, deferred gradients of weights. All others need ends that no
/// library has, or bits that do not depend on how rows are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlainProducts {
    /// This crate's kernels.
    #[default]
    Ours,
    /// cuBLASLt's, whose bits are those of its version. A policy's margin is its target for the number of multiprocessors.
    CublasLt,
}
