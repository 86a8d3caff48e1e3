//! What moves the rows of a rank.

use super::EngineUse;
use counterpoint_nccl::{NcclRank, NcclSums};

/// What moves the rows of one rank.
pub(crate) enum Means {
    /// Kernels that read the other ranks' memory, after events.
    Pull,
    /// Kernels of `num_sms` blocks that do so and pass device-side barriers, and copy engines besides them.
    Link { num_sms: u32, engines: EngineUse },
    /// Copy engines.
    Push,
    /// NCCL, and who forms sums.
    Exchange { nccl: NcclRank, sums: NcclSums },
}
