//! A rank's part in one collective: what is prepared of it, and what the others learn of it.

use std::sync::{Arc, Mutex, OnceLock};

use counterpoint_exec::collective::{Collective, Payload, Post};
use counterpoint_schedule::BufferSpec;

use super::call::{CallError, unpublished};
use super::process::Departure;
use super::ready::OwnPart;
use super::work::Work;
use crate::backend::{CudaBuffer, ExchangeMarks};
use crate::{DeviceBuffer, Event};

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
    pub(super) fn fits(&self, peer: &Self) -> Result<(), String> {
        if self.number == peer.number {
            return Ok(());
        }
        let (own, theirs) = (self.number, peer.number);
        Err(format!(
            "it is ready for its first call as the {own}th of this rank, and as the {theirs}th of the other, which has dropped that \
             one and made it ready again; make a plan ready as often on all ranks"
        ))
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
    pub(super) work: Arc<dyn Work>,
    /// By which its lists are gathered ahead, where it has some.
    pub(super) _ready: Option<Arc<OwnPart>>,
    /// Where the other ranks are processes, which forget it.
    pub(super) _departure: Option<Departure>,
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

    /// Whether calls can be captured, each rank by its own process; if not, why. Device-side barriers have a limit when a graph is replayed
    /// too. Where copy engines move some of the rows, ranks synchronise on the host once, while they capture.
    pub(super) fn can_be_captured(&self) -> Result<(), &'static str> {
        match self.work.can_be_captured()? {
            true => Ok(()),
            false => Err(
                "its ranks have not called it yet, and the first call synchronises on the host; call it once before",
            ),
        }
    }
}
