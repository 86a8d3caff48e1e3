//! The ways in which a pass of a linear layer and its collectives share a device.

/// Multiprocessors that products leave to sums. Two pairs: with 64 of 66 pairs of CTAs most shapes take as many rounds of tiles.
pub const SUMMING_WORKERS: usize = 4;

/// How a pass and its collectives share a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PassOverlap {
    /// One after the other.
    Sequential,
    /// Collectives run beside products and take nothing from them: ranks whose rows other threads or devices move.
    Concurrent,
    /// The transport's kernels move rows beside products. Products start once the kernel that they should hide has, and have so many
    /// multiprocessors fewer while it runs.
    Barrier(usize),
    /// The same, and products leave so many multiprocessors free all the time, so that communication also starts under a product.
    Margin(usize),
    /// One kernel computes all groups of a pass and signals each; what a group sends travels under the rest of that kernel, on so many
    /// multiprocessors that it leaves free; none where communication takes none.
    Signals(usize),
    /// Rows leave and arrive while the kernel that makes or takes them computes, and those of others by copy engines beside it or
    /// what follows.
    Fused,
    /// Copy engines move rows beside the products, and a few multiprocessors that these leave sum them.
    CopyEngine,
}

impl PassOverlap {
    /// Whether communication takes no multiprocessors but for sums.
    pub fn spares_workers(self) -> bool {
        matches!(self, Self::Fused | Self::CopyEngine)
    }

    /// Whether the transport's kernels take multiprocessors that products would have.
    pub fn takes_workers(self) -> bool {
        matches!(self, Self::Barrier(_) | Self::Margin(_) | Self::Signals(1..))
    }
}
