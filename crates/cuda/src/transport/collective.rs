//! A rank's part in one collective: what is prepared of it, and what the others learn of it.

use std::sync::{Arc, Mutex, OnceLock};

use counterpoint_exec::collective::{Collective, Payload, Post};
use counterpoint_schedule::BufferSpec;

use super::call::{CallError, unpublished};
use super::exchange::ExchangeWork;
use super::fused::{BackwardReduceWork, CastGemmWork, GemmReduceWork};
use super::link::LinkWork;
use super::process::Departure;
use super::pull::PullWork;
use super::push::PushWork;
use super::ready::OwnPart;
use crate::backend::{CudaBuffer, ExchangeMarks};
use crate::{DeviceBuffer, Event};
use counterpoint_exec::{CaptureFault, CollectiveDifference};

/// What a rank publishes of its part in a collective.
#[derive(Clone)]
pub(super) struct Part {
    /// Of the collective, among those of its rank.
    pub(super) number: u64,
    pub(super) inputs: Vec<CudaBuffer>,
    pub(super) outputs: Vec<CudaBuffer>,
    /// Where others write partial results, when copy engines do.
    pub(super) staging: Option<DeviceBuffer>,
    /// Where others' kernels write to, when kernels pass a device-side barrier.
    pub(super) mailbox: Option<DeviceBuffer>,
    /// Where ranks follow each other by events.
    pub(super) marks: Option<Marks>,
}

/// What another rank, whose number comes first, has published of its part.
pub(super) type PeerPost = (usize, Arc<Post<Part>>);

/// Events by which ranks follow each other.
#[derive(Clone)]
pub(super) struct Marks {
    /// Passed when the inputs may be read and the outputs be written.
    pub(super) ready: Event,
    /// Passed when this rank is through with the tensors of others.
    pub(super) done: Event,
}

impl Part {
    /// The events of `rank`, whose part this is.
    pub(super) fn marks_of(&self, rank: usize) -> Result<&Marks, CallError> {
        self.marks.as_ref().ok_or_else(|| unpublished(rank))
    }
}

impl Part {
    /// Whether the part of a peer is of the same collective as this one, by which the rank goes.
    pub(super) fn fits(&self, peer: &Self) -> Result<(), CollectiveDifference> {
        match (self.number, peer.number) {
            (own, other) if own == other => Ok(()),
            (own, other) => Err(CollectiveDifference::Preparations { own, other }),
        }
    }
}

impl Payload for Part {
    fn spent(&self) -> Self {
        // Others still wait for the events, and kernels still pass barriers.
        let (mailbox, marks) = (self.mailbox.clone(), self.marks.clone());
        let number = self.number;
        Self { number, inputs: Vec::new(), outputs: Vec::new(), staging: None, mailbox, marks }
    }
}

/// One rank's part in a group collective, made ready.
pub struct CudaCollective {
    /// Among those of its transport.
    pub(super) number: u64,
    pub(super) collective: Arc<Collective>,
    pub(super) outputs: Vec<BufferSpec>,
    /// Made when it is first called.
    pub(super) marks: Mutex<Option<Marks>>,
    /// Likewise, where ranks that are processes follow each other by events: those of a process that is killed never happen.
    pub(super) last_calls: OnceLock<Arc<ExchangeMarks>>,
    pub(super) work: Arc<Work>,
    /// By which its lists are gathered ahead, where it has some.
    pub(super) _ready: Option<Arc<OwnPart>>,
    /// Where the other ranks are processes, which forget it.
    pub(super) _departure: Option<Departure>,
}

/// How its rows are moved. What depends on the other ranks' rows is made in the first run, and again only if those change.
pub(super) enum Work {
    Pull(Mutex<Option<PullWork>>),
    Link(Box<LinkWork>),
    BackwardReduce(Box<BackwardReduceWork>),
    GemmReduce(Box<GemmReduceWork>),
    CastGemm(Box<CastGemmWork>),
    Push(PushWork),
    Exchange(ExchangeWork),
}

impl Work {
    /// Memory that the others' kernels write to, for as long as it is there: where they take in what comes, and the mailbox.
    pub(super) fn memory(&self) -> (Option<DeviceBuffer>, Option<DeviceBuffer>) {
        match self {
            Self::Link(work) => (None, Some(work.side.mailbox())),
            Self::BackwardReduce(work) => (Some(work.memory()), Some(work.side.mailbox())),
            Self::Pull(_) | Self::Push(_) | Self::GemmReduce(_) | Self::CastGemm(_) | Self::Exchange(_) => {
                (None, None)
            }
        }
    }

    /// Whether kernels move its rows by lists of those of all ranks.
    pub(super) fn has_lists(&self) -> bool {
        matches!(self, Self::Link(_) | Self::BackwardReduce(_))
    }

    /// Whether a call adds nothing to what the others know since the collective was made ready.
    pub(super) fn is_known(&self) -> bool {
        match self {
            Self::Link(work) => work.output_readers().is_empty(),
            Self::BackwardReduce(_) => true,
            Self::Pull(_) | Self::Push(_) | Self::GemmReduce(_) | Self::CastGemm(_) | Self::Exchange(_) => {
                false
            }
        }
    }
}

impl CudaCollective {
    /// Whether rows of it travel between `rank`, whose part it is, and another.
    pub(super) fn has_peers(&self, rank: usize) -> bool {
        let pattern = &self.collective.pattern;
        pattern.incoming.iter().chain(&pattern.outgoing).any(|peer| peer.rank != rank)
    }

    /// Parts in which its rows' arrival is signalled.
    pub(super) fn delivery_parts(&self) -> Option<usize> {
        self.collective.delivery_parts
    }

    /// Whether its ranks follow each other by events; else by device-side barriers, or NCCL's.
    pub(super) fn synchronises_by_events(&self) -> bool {
        matches!(&*self.work, Work::Pull(_) | Work::Push(_))
    }

    /// Whether its ranks are connected, where kernels or NCCL do without the host from then on.
    pub(super) fn is_connected(&self) -> bool {
        match &*self.work {
            Work::Link(link) => link.is_connected(),
            Work::BackwardReduce(work) => work.side.is_connected(),
            Work::GemmReduce(work) => work.side.is_connected(),
            Work::CastGemm(work) => work.side.is_connected(),
            Work::Exchange(exchange) => exchange.is_connected(),
            Work::Pull(_) | Work::Push(_) => false,
        }
    }

    /// Whether calls can be captured, each rank by its own process; if not, why. Device-side barriers have a limit when a graph is replayed
    /// too. Where copy engines move some of the rows, ranks synchronise on the host once, while they capture.
    pub(super) fn can_be_captured(&self) -> Result<(), CaptureFault> {
        let knows_others = match &*self.work {
            Work::Link(link) => link.knows_others(),
            Work::BackwardReduce(work) => work.side.is_connected(),
            Work::GemmReduce(work) => work.side.is_connected(),
            Work::CastGemm(work) => work.side.is_connected(),
            Work::Exchange(_) => return Err(CaptureFault::Nccl),
            Work::Pull(_) | Work::Push(_) => return Err(CaptureFault::HostMoves),
        };
        if knows_others { Ok(()) } else { Err(CaptureFault::NotCalledYet) }
    }
}
