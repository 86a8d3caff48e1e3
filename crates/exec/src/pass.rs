//! Whether a run of attention has a backward.

/// What of attention is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The forward alone.
    Forward,
    /// The forward, then the backward.
    ForwardBackward,
}
