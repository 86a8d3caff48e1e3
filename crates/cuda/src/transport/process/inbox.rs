//! CUDA IPC, the receiver's side: opens what peers export and publishes their parts as if they were here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use counterpoint_exec::collective::{Board, Collective, Listener, Pattern, Post};
use counterpoint_exec::{ConnectionFault, ExecError, Mesh, RING_WORDS, Recipient, SharedRings, World};

use super::LOOK;
use super::exports::events_of;
use super::message::{MemoryPlace, PartMessage, TensorPlace};
use crate::backend::{CudaBuffer, exec_error};
use crate::sync::lock;
use crate::transport::Part;
use crate::transport::collective::Marks;
use crate::transport::ready::ReadyParts;
use crate::{CudaError, Device, DeviceBuffer, Event, TransportFault};
use counterpoint_driver::OpenedMemory;

/// What errors call it.
const BETWEEN: &str = "between processes";

/// Takes what the other processes send a rank, and puts their parts on its board.
pub(super) struct Inbox {
    world: Arc<World>,
    rank: usize,
    device: Device,
    board: Arc<Board<Part>>,
    /// To answer. Weak: the connections' threads hold this value.
    answers: OnceLock<Weak<Mesh<PartMessage>>>,
    /// Of collectives that peers have made ready.
    ready: Arc<ReadyParts>,
    rings: Arc<SharedRings>,
    /// What else peers have published, by (peer, its number).
    events: Mutex<BTreeMap<(usize, u64), Event>>,
    memory: Mutex<BTreeMap<(usize, u64), OpenedMemory>>,
    seen: Mutex<Seen>,
    changed: Condvar,
}

/// What peers have done with what this rank published.
#[derive(Default)]
struct Seen {
    /// Where own allocations begin for a peer, by (peer, own number).
    bases: BTreeMap<(usize, u64), u64>,
    /// Peers that have closed all.
    closed: BTreeSet<usize>,
}

impl Inbox {
    pub(super) fn new(world: &Arc<World>, rank: usize, device: &Device, rings: &Arc<SharedRings>) -> Self {
        Self {
            world: world.clone(),
            rank,
            device: device.clone(),
            board: Arc::new(Board::of_rank(world, rank)),
            answers: OnceLock::new(),
            ready: Arc::default(),
            rings: rings.clone(),
            events: Mutex::default(),
            memory: Mutex::default(),
            seen: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(super) fn board(&self) -> &Arc<Board<Part>> {
        &self.board
    }

    pub(super) fn ready(&self) -> &Arc<ReadyParts> {
        &self.ready
    }

    /// By which it answers. No peer may send it anything before.
    pub(super) fn answer_by(&self, mesh: &Arc<Mesh<PartMessage>>) {
        self.answers.get_or_init(|| Arc::downgrade(mesh));
    }

    /// Where an own allocation begins for `peer`, to which it was published; waits until it has answered. `None` at the limit.
    pub(super) fn base_for(&self, peer: usize, number: u64) -> Result<Option<u64>, ExecError> {
        let known = lock(&self.seen).bases.get(&(peer, number)).copied();
        if known.is_some() {
            return Ok(known);
        }
        self.world.note_wait();
        self.wait(Some(self.world.config().limit), |seen| seen.bases.get(&(peer, number)).copied())
    }

    /// Waits until all of `peers` have closed what this rank published, however long they have it.
    pub(super) fn all_closed(&self, peers: usize) -> Result<(), ExecError> {
        self.wait(None, |seen| (seen.closed.len() >= peers).then_some(())).map(drop)
    }

    /// Closes all that peers have published. Nothing on the device uses it any more.
    pub(super) fn close(&self) {
        lock(&self.memory).clear();
    }

    /// Waits until something has been seen; `None` at the limit.
    fn wait<T>(
        &self,
        limit: Option<Duration>,
        ready: impl Fn(&Seen) -> Option<T>,
    ) -> Result<Option<T>, ExecError> {
        let (began, mut seen) = (Instant::now(), lock(&self.seen));
        loop {
            if let Some(found) = ready(&seen) {
                return Ok(Some(found));
            }
            self.world.check()?;
            if limit.is_some_and(|limit| began.elapsed() > limit) {
                return Ok(None);
            }
            seen = match self.changed.wait_timeout(seen, LOOK) {
                Ok((seen, _)) => seen,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    fn note(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut lock(&self.seen));
        self.changed.notify_all();
    }

    /// Opens an allocation of `peer`, and answers where it is.
    fn open(&self, peer: usize, number: u64, handle: &[u8], bytes: usize) -> Result<(), ExecError> {
        let open = || OpenedMemory::open(&self.device, handle, bytes);
        let opened = (self.device.despite_captures(open))
            .map_err(|error| exec_error(self.rank, &format!("the memory of rank {peer}"), error))?;
        let base = opened.base();
        lock(&self.memory).insert((peer, number), opened);
        match self.answers.get().and_then(Weak::upgrade) {
            // This is the thread that reads from the peer: it must not wait for it, nor for who writes to it.
            Some(mesh) => mesh.answer(peer, PartMessage::Opened { number, base }),
            None => Ok(()),
        }
    }

    fn buffer(&self, peer: usize, place: &MemoryPlace) -> Result<DeviceBuffer, CudaError> {
        let Some(number) = place.number else { return DeviceBuffer::new(&self.device, 0) };
        let memory = lock(&self.memory);
        let unknown = CudaError::OutOfBounds { offset: place.offset, bytes: place.bytes, len: 0 };
        let opened = memory.get(&(peer, number)).ok_or(unknown)?;
        // SAFETY: it is closed when the transport goes, through which alone anything is enqueued that uses the buffer.
        unsafe { opened.part(place.offset, place.bytes) }
    }

    fn tensors(&self, peer: usize, places: &[TensorPlace]) -> Result<Vec<CudaBuffer>, CudaError> {
        let tensor = |place: &TensorPlace| {
            CudaBuffer::new(self.buffer(peer, &place.memory)?, &place.shape, place.dtype)
        };
        places.iter().map(tensor).collect()
    }

    /// What `peer` has published of a collective that is ready.
    fn take_ready(&self, peer: usize, message: PartMessage, rows: &[u8]) -> Result<(), CudaError> {
        let PartMessage::Ready { number, place, contract, staging, mailbox } = message else {
            return Ok(());
        };
        let pattern = Pattern::of_bytes(rows).ok_or_else(|| {
            let reason = TransportFault::Rows { peer, bytes: rows.len() }.into();
            CudaError::Transport { transport: BETWEEN, reason }
        })?;
        let (tensors, reduction, delivery_parts) = (Vec::new(), None, None);
        let collective = Arc::new(Collective { contract, pattern, tensors, reduction, delivery_parts });
        let memory = |place: Option<MemoryPlace>| place.map(|place| self.buffer(peer, &place)).transpose();
        let (staging, mailbox) = (memory(staging)?, memory(mailbox)?);
        let payload = Part { number, inputs: Vec::new(), outputs: Vec::new(), staging, mailbox, marks: None };
        self.ready.record(peer, number, Post { place, collective, at: Instant::now(), payload });
        Ok(())
    }

    /// `peer` calls a collective of which it has published all; false where what it published is still on its way.
    fn take_call(&self, peer: usize, [sequence, number]: [u64; RING_WORDS]) -> bool {
        let Some(ready) = self.ready.of(peer, number) else { return false };
        let Post { place, collective, payload, .. } = &*ready;
        let (place, collective, payload) = (place.clone(), collective.clone(), payload.clone());
        self.board.publish(peer, sequence, Post { place, collective, at: Instant::now(), payload }, &[]);
        true
    }

    fn publish(&self, peer: usize, part: PartMessage) -> Result<(), CudaError> {
        let PartMessage::Part { sequence, number, marks: published, inputs, outputs, staging, mailbox } =
            part
        else {
            return Ok(());
        };
        let unpublished = |what, number| unpublished(peer, what, number);
        let event = |number| {
            let known = lock(&self.events).get(&(peer, number)).cloned();
            known.ok_or_else(|| unpublished("event", number))
        };
        let marks = |[ready, done]: [u64; 2]| Ok(Marks { ready: event(ready)?, done: event(done)? });
        let ready = self.ready.of(peer, number).ok_or_else(|| unpublished("collective", number))?;
        let memory = |place: Option<MemoryPlace>| place.map(|place| self.buffer(peer, &place)).transpose();
        let payload = Part {
            number,
            inputs: self.tensors(peer, &inputs)?,
            outputs: self.tensors(peer, &outputs)?,
            staging: memory(staging)?,
            mailbox: memory(mailbox)?,
            marks: published.map(marks).transpose()?,
        };
        let (place, collective) = (ready.place.clone(), ready.collective.clone());
        self.board.publish(peer, sequence, Post { place, collective, at: Instant::now(), payload }, &[]);
        Ok(())
    }
}

/// The error of a peer that names what it has not sent.
fn unpublished(peer: usize, what: &'static str, number: u64) -> CudaError {
    let reason = TransportFault::NotSent { peer, what, number }.into();
    CudaError::Transport { transport: BETWEEN, reason }
}

impl Listener for Inbox {
    fn listen(&self, peer: usize) -> bool {
        self.rings.read(peer, |call| self.take_call(peer, call));
        self.rings.reads(peer)
    }
}

impl Recipient for Inbox {
    type Message = PartMessage;

    fn left(&self, peer: usize) {
        // Its parts come before its farewell.
        self.listen(peer);
        self.board.leave(peer, 0);
    }

    /// Its process has nothing open any more.
    fn ended(&self, peer: usize) {
        self.note(|seen| _ = seen.closed.insert(peer));
    }

    fn receive(&self, peer: usize, message: PartMessage, payload: &[u8]) -> Result<(), ConnectionFault> {
        let taken: Result<(), ExecError> = match message {
            PartMessage::Ready { .. } => self
                .take_ready(peer, message, payload)
                .map_err(|error| exec_error(self.rank, &format!("a collective of rank {peer}"), error)),
            PartMessage::Call { sequence, number } => match self.take_call(peer, [sequence, number]) {
                true => Ok(()),
                false => {
                    let error = unpublished(peer, "collective", number);
                    Err(exec_error(self.rank, &format!("a call of rank {peer}"), error))
                }
            },
            PartMessage::Event { number, handle } => Event::open(&self.device, &handle)
                .map(|event| drop(lock(&self.events).insert((peer, number), event)))
                .map_err(|error| exec_error(self.rank, &format!("an event of rank {peer}"), error)),
            PartMessage::Memory { number, handle, bytes } => self.open(peer, number, &handle, bytes),
            PartMessage::Opened { number, base } => {
                self.note(|seen| _ = seen.bases.insert((peer, number), base));
                Ok(())
            }
            PartMessage::Part { .. } => self
                .publish(peer, message)
                .map_err(|error| exec_error(self.rank, &format!("the part of rank {peer}"), error)),
            PartMessage::Used { sequence } => {
                self.board.acknowledge(self.rank, sequence, peer);
                Ok(())
            }
            PartMessage::Gone { number } => {
                // Its calls were written before.
                self.listen(peer);
                self.ready.forget(peer, number);
                let mut events = lock(&self.events);
                events_of(number).iter().for_each(|event| drop(events.remove(&(peer, *event))));
                Ok(())
            }
            PartMessage::Closed => {
                self.note(|seen| _ = seen.closed.insert(peer));
                Ok(())
            }
        };
        // Whoever waits for what this was about hears of it.
        if let Err(error) = taken {
            self.world.fail(error);
        }
        Ok(())
    }
}
