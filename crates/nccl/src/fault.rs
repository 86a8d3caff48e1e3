//! Why NCCL does not connect ranks, or why a wait inside it ended.

use std::time::Duration;

use counterpoint_exec::ExecError;
use thiserror::Error;

/// Why NCCL does not connect ranks, or why a wait inside it ended.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum NcclFault {
    /// Threads that share a GPU ask for NCCL.
    #[error(
        "rank {rank} shares {device} with a rank before it, and NCCL wants a GPU for each; use fewer ranks, or another transport"
    )]
    SharedDevice {
        /// The rank.
        rank: usize,
        /// Its GPU.
        device: String,
    },
    /// Ranks of several nodes are on one host, and NCCL would find that out.
    #[error(
        "NCCL would take ranks of several nodes for those of one host; set {variable} to `{host}` for this rank before its process starts"
    )]
    HostUnset {
        /// The variable that says what ranks of a host have alike.
        variable: &'static str,
        /// What this rank's is.
        host: String,
    },
    /// NCCL connects too slowly.
    #[error("{ranks} ranks were not connected after {:.3} s", limit.as_secs_f64())]
    NotConnected {
        /// Ranks.
        ranks: usize,
        /// The limit.
        limit: Duration,
    },
    /// A connection is used by another world.
    #[error("connection {number} of rank {rank} has another user already")]
    ConnectionInUse {
        /// Its number.
        number: u64,
        /// The rank.
        rank: usize,
    },
    /// A connection without a rank of this process.
    #[error("it has no rank here")]
    NoRank,
    /// A connection that was aborted, because a rank had failed.
    #[error("it was aborted")]
    Aborted,
    /// NCCL refuses a call because another rank has failed.
    #[error("rank {rank} could not exchange anything: {failure}")]
    NoExchange {
        /// The rank that called.
        rank: usize,
        /// What ended the group.
        failure: Box<ExecError>,
    },
    /// A rank waits no longer because another has failed.
    #[error("rank {rank} stopped to wait for {what}: {failure}")]
    Stopped {
        /// The rank that waited.
        rank: usize,
        /// For what.
        what: String,
        /// What ended the group.
        failure: Box<ExecError>,
    },
    /// A wait inside NCCL reached its limit.
    #[error("rank {rank} waited {:.3} s for {what}", limit.as_secs_f64())]
    WaitedFor {
        /// The rank that waited.
        rank: usize,
        /// For what.
        what: String,
        /// The limit.
        limit: Duration,
    },
}
