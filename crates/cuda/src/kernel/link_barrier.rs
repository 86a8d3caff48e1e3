//! Mailboxes and calls by which kernels of peer GPUs wait for each other; the host's side of `link_barrier.cuh`.

use std::time::Duration;

use counterpoint_schedule::Delivery;

use super::{MissedWait, RowsFault, WaitLimit, WaitRecord};
use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, DeviceBuffer, Stream};

/// Ranks that can pass device-side barriers (`kLinkRanks`).
pub const LINK_RANKS: usize = 16;
/// Tensors of one call (`kLinkTensors`).
pub const LINK_TENSORS: usize = 13;
/// Parts that a call's rows may be signalled in (`kLinkParts`).
pub const LINK_PARTS: usize = 8;
/// Blocks of a launch that take part in a barrier: each adds to a word that counts a call once it has grown by so much (`kLinkPasses`).
pub const LINK_BLOCKS: u32 = 1024;
/// Of tensors that ranks announce, in bytes (`link_place`).
const ALIGNMENT: u64 = 16;

/// `LinkSlot` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct LinkSlot {
    announced: u64,
    passed: u64,
    delivered: u64,
    tensors: [u64; LINK_TENSORS],
}

/// `LinkState` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct LinkState {
    calls: u64,
    arrived: u32,
    faults: u32,
    taken: u64,
    parts: [u32; LINK_PARTS],
}

/// A wait inside a kernel that gave up at its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissedRank {
    /// Who did not come.
    pub rank: usize,
    /// What it did not do.
    pub step: LinkStep,
    /// The last call in which it did.
    pub seen: u64,
    /// The call in which it was to.
    pub wanted: u64,
}

/// What ranks wait for in each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkStep {
    /// To begin a call.
    Begin,
    /// To be through with the tensors of the one that waits.
    Pass,
    /// To send a piece of its rows.
    Send,
    /// To deliver a part of its rows; what counts is not calls then but parts.
    Deliver,
}

/// `LinkCall` of the kernels: one call of one rank.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LinkCall {
    slots: [u64; LINK_RANKS],
    announced: [u64; LINK_TENSORS],
    own: [u64; LINK_TENSORS],
    shifts: u64,
    mailbox: u64,
    state: u64,
    limit: WaitLimit,
    tensors: u32,
    announce_to: u32,
    work_on: u32,
}

const MAILBOX_BYTES: usize = LINK_RANKS * size_of::<LinkSlot>();

/// A rank's end of one collective whose ranks pass device-side barriers: its mailbox in its GPU's memory, and in the host's
/// what a wait that gave up records.
#[derive(Debug)]
pub struct LinkEnd {
    memory: DeviceBuffer,
    record: WaitRecord,
}

/// The peers of a rank in a collective.
#[derive(Clone, Debug)]
pub struct LinkPeers {
    /// The mailboxes of the others and the own one, by rank.
    pub mailboxes: Vec<(usize, DeviceBuffer)>,
    /// Ranks that work on the tensors that this one announces.
    pub announce_to: Vec<usize>,
    /// Ranks on whose tensors this one works.
    pub work_on: Vec<usize>,
}

impl LinkEnd {
    /// An empty mailbox, on `setup`, which is waited for.
    ///
    /// # Errors
    /// When memory is used up.
    pub fn new(setup: &Stream) -> Result<Self, CudaError> {
        // Copied: a kernel that fills memory would wait for room on a busy device, and the host for that.
        let memory = DeviceBuffer::new(setup.device(), MAILBOX_BYTES + size_of::<LinkState>())?;
        memory.upload(setup, 0, &[0u8; MAILBOX_BYTES + size_of::<LinkState>()])?;
        Ok(Self { memory, record: WaitRecord::new(setup.device())? })
    }

    /// What the other ranks write to.
    pub fn mailbox(&self) -> &DeviceBuffer {
        &self.memory
    }

    /// The first wait that gave up, if one did.
    pub fn missed(&self) -> Option<MissedRank> {
        let MissedWait { rank, step, seen, wanted } = self.record.missed()?;
        let step = match step {
            0 => LinkStep::Begin,
            1 => LinkStep::Pass,
            2 => LinkStep::Send,
            _ => LinkStep::Deliver,
        };
        Some(MissedRank { rank, step, seen, wanted })
    }

    /// One call of `rank`: the same for every run with the same tensors. `announced` are its tensors that others work on,
    /// `own` those on its side of its own work. Each wait lasts `limit` at most.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when there are more ranks or tensors than kernels have room for, or when an announced address is no
    /// multiple of 16.
    pub fn call(
        &self,
        rank: usize,
        peers: &LinkPeers,
        announced: &[u64],
        own: &[u64],
        limit: Duration,
    ) -> Result<LinkCall, CudaError> {
        let ranks = peers.mailboxes.iter().map(|(rank, _)| rank + 1).max().unwrap_or(0).max(rank + 1);
        if ranks > LINK_RANKS || announced.len() > LINK_TENSORS || own.len() != announced.len() {
            let fault = RowsFault::Link {
                ranks,
                announced: announced.len(),
                own: own.len(),
                most_ranks: LINK_RANKS,
                most_tensors: LINK_TENSORS,
            };
            return Err(CudaError::Launch { kernel: "a link".to_owned(), reason: fault.into() });
        }
        if let Some(odd) = announced.iter().find(|address| **address % ALIGNMENT != 0) {
            let reason = RowsFault::LinkAddress { address: *odd, alignment: ALIGNMENT }.into();
            return Err(CudaError::Launch { kernel: "a link".to_owned(), reason });
        }
        let mut slots = [0; LINK_RANKS];
        for (peer, mailbox) in &peers.mailboxes {
            slots[*peer] = mailbox.address() + (rank * size_of::<LinkSlot>()) as u64;
        }
        let listed = |addresses: &[u64]| std::array::from_fn(|at| addresses.get(at).copied().unwrap_or(0));
        let mask = |ranks: &[usize]| ranks.iter().fold(0u32, |mask, rank| mask | 1 << rank);
        Ok(LinkCall {
            slots,
            announced: listed(announced),
            own: listed(own),
            shifts: 0,
            mailbox: self.memory.address(),
            state: self.memory.address() + MAILBOX_BYTES as u64,
            limit: self.record.limit(limit),
            tensors: announced.len() as u32,
            announce_to: mask(&peers.announce_to),
            work_on: mask(&peers.work_on),
        })
    }
}

/// `LinkArrivals` of the kernels: rows that others send while a kernel runs which takes them as they come.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LinkArrivals {
    mailbox: u64,
    state: u64,
    limit: WaitLimit,
    senders: u32,
    parts: u32,
    ends: [i32; LINK_PARTS],
}

impl LinkArrivals {
    /// Nothing to wait for.
    pub const NONE: Self =
        Self { mailbox: 0, state: 0, limit: WaitLimit::NONE, senders: 0, parts: 0, ends: [0; LINK_PARTS] };

    /// Those of a call's outputs, once the launch of that call has started, signalled in so many `parts`.
    pub fn of(call: &LinkCall, parts: usize) -> Self {
        let LinkCall { mailbox, state, limit, announce_to: senders, .. } = *call;
        let parts = if senders == 0 { return Self::NONE } else { parts.min(LINK_PARTS) as u32 };
        Self { mailbox, state, limit, senders, parts, ends: [0; LINK_PARTS] }
    }

    /// Where the rows are `own_rows`, and after them `rows` that come in even parts.
    #[must_use]
    pub(super) fn after(self, own_rows: usize, rows: usize) -> Self {
        let parts = self.parts as usize;
        let end = |part: usize| own_rows + Delivery::end(part, parts, rows);
        Self { ends: std::array::from_fn(|part| if part < parts { end(part) as i32 } else { 0 }), ..self }
    }
}

impl LinkCall {
    /// Where this rank's tensor of that number is on its side of its own work.
    pub(super) fn own_address(&self, tensor: usize) -> u64 {
        self.own[tensor]
    }

    /// The same call where ranks are processes, which reach the announced tensors by other addresses than this one.
    #[must_use]
    pub fn shifted(self, shifts: &LinkShifts) -> Self {
        Self { shifts: shifts.0.address(), ..self }
    }
}

/// By how much the addresses by which other processes reach this rank's tensors differ from its own.
#[derive(Clone, Debug)]
pub struct LinkShifts(DeviceBuffer);

impl LinkShifts {
    /// From (rank, tensor, difference), all others 0; on `setup`, which is waited for.
    ///
    /// # Errors
    /// When memory is used up.
    pub fn new(
        setup: &Stream,
        shifts: impl IntoIterator<Item = (usize, usize, u64)>,
    ) -> Result<Self, CudaError> {
        let mut table = vec![0u64; LINK_RANKS * LINK_TENSORS];
        for (rank, tensor, shift) in shifts {
            table[rank * LINK_TENSORS + tensor] = shift;
        }
        DeviceBuffer::from_slice(setup, &table).map(Self)
    }
}

/// Types that the kernels share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("link_barrier.cuh", LinkSlot { announced, passed, delivered, tensors }),
        shared_layout!("link_barrier.cuh", LinkState { calls, arrived, faults, taken, parts }),
        shared_layout!("link_barrier.cuh", LinkArrivals { mailbox, state, limit, senders, parts, ends }),
        shared_layout!(
            "link_barrier.cuh",
            LinkCall { slots, announced, own, shifts, mailbox, state, limit, tensors, announce_to, work_on }
        ),
    ]
}
