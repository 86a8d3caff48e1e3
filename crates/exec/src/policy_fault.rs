//! Why a machine cannot overlap as a policy says.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a machine cannot overlap as a policy says, and what to use instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum PolicyFault {
    /// What moves its rows cannot do it.
    #[error("{reason}")]
    Transport {
        /// What the table of transports says (`PolicySupport::Refused`).
        reason: Cow<'static, str>,
    },
    /// CPU ranks cannot do it.
    #[error("{reason}; use sequential, concurrent, kernel-barrier or signals, with sm-margin=N")]
    CpuRanks {
        /// What the table of transports says.
        reason: Cow<'static, str>,
    },
    /// The driver was started with other hardware queues.
    #[error(
        "the driver reads CUDA_DEVICE_MAX_CONNECTIONS when the program starts; set it to 1 and start again"
    )]
    HardwareQueues,
    /// The driver does not part the GPU.
    #[error("this GPU cannot be parted ({reason}); use sm-margin=N")]
    Partition {
        /// The driver's words.
        reason: String,
    },
    /// A barrier that waits for the start of what says nothing of it.
    #[error(
        "nothing says when NCCL's own sum `{place}` has started; use kernel-barrier+sm-margin=N with a multiprocessor for each of its \
         blocks (nccl+max-ctas=N), or leave library-sums out of the transport"
    )]
    NoStart {
        /// The collective.
        place: String,
    },
}
