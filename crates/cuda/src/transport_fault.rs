//! Why ranks cannot use a transport, or a collective over it.

use std::time::Duration;

use counterpoint_exec::CollectiveFault;
use thiserror::Error;

/// Why ranks cannot use a transport, or why it did not come to its end.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum TransportFault {
    /// Threads of one process ask for a transport of processes.
    #[error("is for ranks that are processes; start one a GPU with torchrun or mpirun")]
    OfProcesses,
    /// Processes that share a GPU ask for NCCL.
    #[error(
        "{sharing} ranks share a GPU, and NCCL wants a GPU for each; start fewer processes a host, or use --transport nvlink where all \
         are on one host"
    )]
    SharedGpu {
        /// Ranks of one GPU.
        sharing: usize,
    },
    /// Ranks do not reach each other's memory.
    #[error("{0}; use --transport nccl")]
    Unreached(Unreached),
    /// NCCL's part of a measurement reached its limit.
    #[error("NCCL did not end in {:.3} s", limit.as_secs_f64())]
    NotEnded {
        /// The limit.
        limit: Duration,
    },
    /// Memory that others cannot open.
    #[error("memory of the caller's is not opened by others; this is a bug, please report it")]
    BorrowedMemory,
    /// A message that is not understood.
    #[error("rank {peer} has sent {bytes} bytes that are no rows of a collective")]
    Rows {
        /// Who sent it.
        peer: usize,
        /// Its bytes.
        bytes: usize,
    },
    /// A message about what was never sent.
    #[error("rank {peer} names {what} {number}, which it has not sent")]
    NotSent {
        /// Who sent it.
        peer: usize,
        /// `collective`, `event` or `allocation`.
        what: &'static str,
        /// Its number.
        number: u64,
    },
}

/// Why ranks do not reach each other's memory.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, Error)]
#[non_exhaustive]
pub enum Unreached {
    /// They are apart.
    #[error("ranks {rank} and {peer} are on different hosts")]
    OtherHost {
        /// One.
        rank: usize,
        /// The other.
        peer: usize,
    },
    /// A driver without memory that processes share.
    #[error("the driver of rank {peer} shares no memory between processes")]
    NotShared {
        /// Whose driver.
        peer: usize,
    },
    /// Memory that cannot be opened.
    #[error("rank {rank} cannot open memory of rank {peer}: {text}")]
    NotOpened {
        /// Who tried.
        rank: usize,
        /// Whose memory.
        peer: usize,
        /// The driver's words.
        text: String,
    },
}

/// Why a call of a collective cannot be enqueued.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CallFault {
    /// Rows that no kernel moves or combines.
    #[error(transparent)]
    Collective(#[from] CollectiveFault),
    /// A sum of no tensor.
    #[error("it has no tensor")]
    NoTensor,
    /// A sum in one launch of results of several types.
    #[error("results that are summed in one launch have one type")]
    OtherTypes,
    /// A rank does not say where its memory is.
    #[error("rank {rank} has not published where its memory is; this is a bug, please report it")]
    Unpublished {
        /// The rank.
        rank: usize,
    },
    /// Memory that others write has moved.
    #[error(
        "the other ranks write into its memory and know where that was when they first connected; make the Program ready again to use \
         other memory"
    )]
    Moved,
    /// Keys that arrive in another order than the kernel finds their owners by.
    #[error("keys of other ranks do not follow each other")]
    KeysApart,
    /// A capture before lists have come to the device.
    #[error("its lists are not on the device after {limit:?}; synchronize before the capture")]
    ListsNotThere {
        /// How long it was waited for.
        limit: Duration,
    },
}
