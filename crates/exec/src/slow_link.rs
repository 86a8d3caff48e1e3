//! Links that transports of this process imitate.

use std::time::Duration;

use counterpoint_plan::Topology;

/// A link that the local transport imitates: a group collective in which a rank exchanges rows with others takes
/// at least `alpha + bytes / bytes_per_second` on that rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowLink {
    /// Added to every collective.
    pub alpha: Duration,
    /// Bytes a second of a rank, the larger of what it sends and what it receives.
    pub bytes_per_second: f64,
    /// A slower one between nodes. Both work side by side: what takes longer counts.
    pub network: Option<SlowNetwork>,
}

/// A network between nodes that the local transport imitates; see [`SlowLink`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowNetwork {
    /// Added to every collective in which a rank exchanges rows with another node.
    pub alpha: Duration,
    /// Bytes a second of a rank, as for a link.
    pub bytes_per_second: f64,
    /// Ranks and nodes.
    pub topology: Topology,
}
