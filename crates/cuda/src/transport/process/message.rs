//! The messages between GPU ranks in different processes of a host: IPC handles, and parts of collectives.

use counterpoint_exec::OpPlace;
use counterpoint_exec::collective::Contract;
use counterpoint_plan::DType;
use serde::{Deserialize, Serialize};

/// What GPU ranks of different processes send each other. Numbers are the sender's own; what they stand for is sent once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum PartMessage {
    /// A collective that is ready, which later messages name: memory that the others' kernels write to, and its rows, which are the payload.
    Ready {
        number: u64,
        place: OpPlace,
        contract: Contract,
        staging: Option<MemoryPlace>,
        mailbox: Option<MemoryPlace>,
    },
    /// The sender calls a collective of which the receiver knows all.
    Call { sequence: u64, number: u64 },
    /// An event, which later parts name.
    Event { number: u64, handle: Vec<u8> },
    /// An allocation, in which the tensors of later parts lie.
    Memory { number: u64, handle: Vec<u8>, bytes: usize },
    /// The receiver's allocation begins here in the sender's address space.
    Opened { number: u64, base: u64 },
    /// The sender's part in a call of a collective.
    Part {
        sequence: u64,
        number: u64,
        /// Its events, ready and done, where ranks follow each other by them.
        marks: Option<[u64; 2]>,
        inputs: Vec<TensorPlace>,
        outputs: Vec<TensorPlace>,
        staging: Option<MemoryPlace>,
        mailbox: Option<MemoryPlace>,
    },
    /// The sender has enqueued its use of what the receiver published.
    Used { sequence: u64 },
    /// No later message names this collective, nor its events.
    Gone { number: u64 },
    /// The sender has closed all that it had opened.
    Closed,
}

/// Bytes of an allocation of the sender's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MemoryPlace {
    /// The allocation; `None` for no bytes.
    pub(super) number: Option<u64>,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

/// A tensor of the sender's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct TensorPlace {
    pub(super) memory: MemoryPlace,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
}
