//! Why runs fail: tensors, policies, plans that differ between ranks, stalls with who waited for whom, devices, peers lost.

use std::time::Duration;

use counterpoint_schedule::Program;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    CaptureFault, CollectiveDifference, CollectiveFault, DeviceFault, PolicyFault, ProgramFault,
    RendezvousError, TablesFault, TensorFault,
};

/// Why a run ended without a result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum ExecError {
    /// A tensor is not what the plan needs.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: TensorFault,
    },
    /// An overlap policy that this machine cannot follow.
    #[error("rank {rank} cannot overlap by `{policy}`: {reason}")]
    Policy {
        /// The rank that says so.
        rank: usize,
        /// The policy.
        policy: String,
        /// What cannot be done and what to use.
        reason: PolicyFault,
    },
    /// A Program that no backend can run.
    #[error("program `{program}` of rank {rank} cannot run: {reason}")]
    Program {
        /// The Program's name.
        program: String,
        /// Its rank.
        rank: usize,
        /// The operation or buffer, what is wrong with it and what to do.
        reason: ProgramFault,
    },
    /// Ranks called plans of different contents.
    #[error(
        "ranks {rank} and {peer} run different plans: {what} is {own} on rank {rank} and {other} on rank {peer}; give all ranks the \
         same mask, spec and configuration, and have them call their plans in the same order"
    )]
    PlanDiffers {
        /// The rank that noticed.
        rank: usize,
        /// The other.
        peer: usize,
        /// What is different.
        what: String,
        /// As this rank has it.
        own: String,
        /// As the other has it.
        other: String,
    },
    /// A rank ended the group by [`Group::fail`](crate::Group::fail).
    #[error("rank {rank} gave up: {reason}")]
    GaveUp {
        /// The rank.
        rank: usize,
        /// Its own words.
        reason: String,
    },
    /// A rank has closed its group, dropped it, or ended its process in order, and another needs it still.
    #[error(
        "rank {left} left the group; rank {rank} still needs it in {place}: have all ranks make the same calls before one of them \
         closes or drops its group"
    )]
    Left {
        /// Who has left.
        left: usize,
        /// Who needs it.
        rank: usize,
        /// In what.
        place: String,
    },
    /// A call whose ranks synchronise on the host, on a stream that somebody captures. Nothing has been enqueued.
    #[error("rank {rank}: `{program}` cannot go into a graph: {reason}")]
    Capture {
        /// The rank.
        rank: usize,
        /// The Program.
        program: String,
        /// Why not, and what to do.
        reason: CaptureFault,
    },
    /// Step tables that were made ahead are not those that are wanted. Nothing has been made ready.
    #[error("rank {rank} does not take these step tables: {reason}")]
    Tables {
        /// The rank that was given them.
        rank: usize,
        /// What is wrong with them, and what to do.
        reason: TablesFault,
    },
    /// A call of a group that has been closed.
    #[error("the group of rank {rank} is closed; join a new one")]
    Closed {
        /// The rank.
        rank: usize,
    },
    /// Two operations that no event, barrier or signal orders used one buffer at the same time, one of them writing.
    #[error(
        "data race on buffer `{buffer}` of rank {owner}: {wanted} while {held}; order them with an event"
    )]
    DataRace {
        /// The rank that the buffer belongs to.
        owner: usize,
        /// The buffer.
        buffer: String,
        /// Who wanted it and for what.
        wanted: String,
        /// Who had it and for what.
        held: String,
    },
    /// A rank's own part in a group collective makes no sense. Nothing was sent.
    #[error("rank {rank} cannot take part in {collective}: {reason}")]
    BadCollective {
        /// The rank whose part it is.
        rank: usize,
        /// The collective's label.
        collective: String,
        /// What is wrong and what to do.
        reason: Box<CollectiveFault>,
    },
    /// Two ranks' parts in one group collective do not fit each other.
    #[error(
        "ranks {rank} and {peer} disagree in collective {sequence} {collective}: {reason}; both must build it from one \
         plan"
    )]
    CollectiveMismatch {
        /// The rank that found it.
        rank: usize,
        /// The other.
        peer: usize,
        /// The collective's sequence number.
        sequence: u64,
        /// Label and stage.
        collective: String,
        /// Both sides' figures.
        reason: Box<CollectiveDifference>,
    },
    /// Two ranks issued different group collectives at the same place of their sequence.
    #[error(
        "collective {sequence} is {own} on rank {rank} but {other} on rank {peer}; all ranks must issue the same \
         collectives in the same order"
    )]
    CollectiveOrder {
        /// The rank that found it.
        rank: usize,
        /// The other.
        peer: usize,
        /// The sequence number.
        sequence: u64,
        /// What this rank issued.
        own: String,
        /// What the other issued.
        other: String,
    },
    /// A wait reached its limit.
    #[error("{0}")]
    Stalled(Box<Stall>),
    /// A thread of a rank panicked.
    #[error("rank {rank} panicked in {place}: {message}")]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// The operation.
        place: String,
        /// The panic's message.
        message: String,
    },
    /// The buffers do not fit into memory.
    #[error(
        "{} needs {needed} bytes of memory and {available} are available; use fewer rows, a narrower dtype, or more memory",
        whose(.rank)
    )]
    OutOfMemory {
        /// The rank, where it is one's memory that is used up.
        rank: Option<usize>,
        /// Bytes of all ranks' buffers.
        needed: u64,
        /// Bytes that the machine has left.
        available: u64,
    },
    /// A call of a device's driver or of its compiler failed.
    #[error("rank {rank}, {place}: {reason}")]
    Device {
        /// The rank.
        rank: usize,
        /// The operation, or what was being prepared.
        place: String,
        /// What it cannot do, or the driver's own words.
        reason: DeviceFault,
    },
    /// Ranks that are processes did not come together, or one of them was lost.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The operating system gave no thread.
    #[error(
        "rank {rank} cannot start a thread for stream `{stream}`: {text}; use fewer ranks or raise the limit"
    )]
    Thread {
        /// The rank.
        rank: usize,
        /// The stream.
        stream: String,
        /// The system's words.
        text: String,
    },
}

impl ExecError {
    /// What is wrong with the tensor of this name.
    pub fn tensor(name: &str, fault: impl Into<TensorFault>) -> Self {
        Self::Tensor { name: name.to_owned(), reason: fault.into() }
    }

    /// Why this Program cannot run.
    pub fn program(program: &Program, fault: impl Into<ProgramFault>) -> Self {
        Self::Program { program: program.name.clone(), rank: program.rank, reason: fault.into() }
    }

    /// As others are notified of it: with the rank whose error it is, where it does not name one itself.
    pub(crate) fn of_rank(self, rank: usize) -> Self {
        match self {
            Self::Tensor { .. } | Self::OutOfMemory { rank: None, .. } => {
                RendezvousError::RankFailed { rank, error: self.to_string() }.into()
            }
            other => other,
        }
    }
}

fn whose(rank: &Option<usize>) -> String {
    rank.map_or_else(|| "this run".to_owned(), |rank| format!("rank {rank}"))
}

/// A wait that reached its limit: who waited for whom, where, and who held everything up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Error)]
#[error(
    "rank {rank} waited {:.3} s for {awaited} in {place}; {evidence}; held up by rank {culprit}: {culprit_doing}. Raise \
     the limit if that may take so long",
    waited.as_secs_f64()
)]
pub struct Stall {
    /// The rank that waited.
    pub rank: usize,
    /// Where it waited: ``collective 4 `cast kv` (stage 2)`` or ``stream compute, `wait kv` (stage 1)``.
    pub place: String,
    /// What it waited for: `rank 5`, `an event of stream communication`.
    pub awaited: String,
    /// How long.
    pub waited: Duration,
    /// The last that was seen of what it waited for.
    pub evidence: String,
    /// The rank at the end of the chain of waits.
    pub culprit: usize,
    /// What that rank was doing.
    pub culprit_doing: String,
}
