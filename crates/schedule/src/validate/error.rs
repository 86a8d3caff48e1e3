//! What validation finds: unknown indices, waits that nothing ends, buffers overwritten, races.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::OperandFault;

/// What is wrong with a Program. Operations are named by their index in [`Program::ops`](crate::Program::ops) and their label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// An index names nothing.
    #[error("op {op} ({label}) names {what} that the Program does not have")]
    Unknown {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// A thing of what kind.
        what: ProgramThing,
    },
    /// An operation waits for something that nothing queued before it produces.
    #[error("op {op} ({label}) waits for {what} that no earlier op produces; queue the producer first")]
    NoProducer {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// Event, barrier, signal or delivery.
        what: ProgramThing,
    },
    /// An event is recorded twice.
    #[error("op {op} ({label}) records event {event} a second time")]
    RecordedTwice {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// The event.
        event: usize,
    },
    /// An input is written.
    #[error("op {op} ({label}) writes input `{buffer}`")]
    WritesInput {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// Name of the buffer.
        buffer: String,
    },
    /// What a slot says makes no sense.
    #[error("slot {slot} {reason}")]
    Slot {
        /// Index of the slot.
        slot: usize,
        /// What is wrong with it.
        reason: SlotFault,
    },
    /// An operation reads a buffer after another one has reused the slot.
    #[error(
        "op {op} ({label}) reads buffer `{buffer}`, whose slot holds `{other}` by then; read it earlier or give it a slot of its own"
    )]
    Overwritten {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// Name of the buffer.
        buffer: String,
        /// Name of the buffer that the slot holds.
        other: String,
    },
    /// A fused operation has other parts than [`Op::Fused`](crate::Op::Fused) names.
    #[error("op {op} ({label}) fuses operations that no kernel fuses; write them one after the other")]
    NotFusable {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
    },
    /// A product whose rows travel while it is computed may run concurrently with another collective.
    #[error(
        "ops {first} ({first_label}) and {second} ({second_label}) may wait for other ranks at the same time, and one of them \
         holds all workers meanwhile; order them by an event"
    )]
    UnorderedFused {
        /// Index of the operation queued first.
        first: usize,
        /// Its label.
        first_label: String,
        /// Index of the other.
        second: usize,
        /// Its label.
        second_label: String,
    },
    /// A computation waits inside for rows whose group-cast it may keep from starting.
    #[error(
        "op {op} ({label}) takes rows as they arrive and may hold all workers before their group-cast has started; await its \
         start"
    )]
    StartNotAwaited {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
    },
    /// Two operations use one buffer (or one slot), at least one writes it, and nothing orders them.
    #[error(
        "ops {first} ({first_label}) and {second} ({second_label}) race on buffer `{buffer}`; order them by an event"
    )]
    Race {
        /// Index of the operation queued first.
        first: usize,
        /// Its label.
        first_label: String,
        /// Index of the other.
        second: usize,
        /// Its label.
        second_label: String,
        /// Name of the buffer.
        buffer: String,
    },
    /// Two buffers have one name.
    #[error("two buffers are named `{name}`")]
    NamedTwice {
        /// The name.
        name: String,
    },
    /// A buffer has no axes.
    #[error("buffer `{name}` has no row axis")]
    NoRowAxis {
        /// Its name.
        name: String,
    },
    /// A tensor of a computation does not fit it or the others.
    #[error("op {op} ({label}): {fault}")]
    Operand {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// What is wrong.
        fault: OperandFault,
    },
}

/// A kind of thing that operations name by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramThing {
    /// A stream.
    Stream,
    /// A buffer.
    Buffer,
    /// An event.
    Event,
    /// A barrier.
    Barrier,
    /// A signal.
    Signal,
    /// A group-cast whose rows are signalled as they arrive.
    Delivery,
    /// One in as many parts as are awaited.
    DeliveryInParts,
}

impl fmt::Display for ProgramThing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stream => "a stream",
            Self::Buffer => "a buffer",
            Self::Event => "an event",
            Self::Barrier => "a barrier",
            Self::Signal => "a signal",
            Self::Delivery => "a delivery",
            Self::DeliveryInParts => "a delivery in as many parts",
        })
    }
}

/// What is wrong with a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum SlotFault {
    /// It names a buffer that there is not.
    #[error("names a buffer that the Program does not have")]
    UnknownBuffer,
    /// It names an input or a result.
    #[error("names a buffer that is not scratch")]
    NotScratch,
    /// It names a buffer of another slot, or one twice.
    #[error("names a buffer that has a slot already")]
    HasSlot,
}
