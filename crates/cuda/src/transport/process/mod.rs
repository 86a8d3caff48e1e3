//! Ranks that are processes of one host, or of several.
//!
//! A process has a board of its own. What a rank publishes there it also sends to its peers, by messages that go where its memory
//! and events are named by handles of the driver; they open those and publish the part on their boards. From there on waiting,
//! comparing and enqueueing are the code of threads. Allocations, events and rows are sent once, later parts name them. A call that adds
//! nothing to that is two words in a ring that both processes map ([`SharedRings`]).
//!
//! An address means something in one process only. Kernels with device-side barriers send each other addresses, so who announces
//! one adds what the peer's mapping of that allocation differs by, which the peer has answered.

mod exports;
mod inbox;
mod message;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::collective::{Board, Collective, Listener, Pattern, PeerRows, Post};
use counterpoint_exec::{Awaited, Blocker, ExecError, Mesh, OpPlace, Rendezvous, SharedRings, World};

use self::exports::{Exports, Sent, events_of};
use self::inbox::Inbox;
use self::message::{MemoryPlace, PartMessage, TensorPlace};
use super::collective::Marks;
use super::lists::Lists;
use super::ready::ReadyParts;
use super::stand_in::StandIns;
use super::{CallError, Part};
use crate::backend::CudaBuffer;
use crate::kernel::LinkShifts;
use crate::sync::lock;
use crate::{CudaError, Device, DeviceBuffer, Stream};
use counterpoint_driver::AllocationPlace;
use counterpoint_driver::GivenWork;
use counterpoint_driver::Inside;

/// The ranks of other processes, as one rank's transport reaches them. Dropping it waits for nobody: a thread keeps what the others
/// have open until they have closed it. When the job fails, nothing of the device is freed any more: what is enqueued may wait for an
/// event that a killed process has published, and never records.
pub(super) struct PeerProcesses {
    connected: Arc<Connected>,
    gone: Arc<Mutex<Vec<u64>>>,
}

/// What lives until the others have closed what this rank has published.
struct Connected {
    world: Arc<World>,
    rank: usize,
    device: Device,
    inbox: Arc<Inbox>,
    rings: Arc<SharedRings>,
    mesh: Arc<Mesh<PartMessage>>,
    exports: Mutex<Exports>,
    /// Differences of addresses.
    shifts: Mutex<BTreeMap<Announced, Arc<Shifts>>>,
}

/// Differences of addresses, and when they are on the device.
struct Shifts {
    table: LinkShifts,
    lists: Lists,
}

/// The allocations of tensors that kernels announce, and the ranks that they announce them to.
type Announced = (Vec<u64>, Vec<usize>);

/// To whom a rank publishes where its tensors lie, among those that exchange rows with it.
#[derive(Clone, Copy)]
pub(super) enum Readers<'a> {
    All,
    Those(&'a [PeerRows]),
}

impl Readers<'_> {
    fn contain(self, rank: usize) -> bool {
        match self {
            Self::All => true,
            Self::Those(readers) => readers.iter().any(|reader| reader.rank == rank),
        }
    }
}

/// Between two looks at whether something has ended.
const LOOK: Duration = Duration::from_millis(5);

/// Goes with a collective: the others forget it when this rank next sends them anything.
pub(super) struct Departure {
    number: u64,
    gone: Arc<Mutex<Vec<u64>>>,
    stand_ins: Arc<StandIns>,
}

impl Drop for Departure {
    fn drop(&mut self) {
        self.stand_ins.forget(self.number);
        lock(&self.gone).push(self.number);
    }
}

impl PeerProcesses {
    /// Connects this rank to all others, which do the same with the same `name`.
    pub(super) fn connect(
        rendezvous: &Rendezvous,
        world: &Arc<World>,
        device: &Device,
        name: &str,
    ) -> Result<Self, ExecError> {
        let rank = rendezvous.rank();
        let rings = Arc::new(SharedRings::connect(rendezvous, name)?);
        let inbox = Arc::new(Inbox::new(world, rank, device, &rings));
        let left = device.clone();
        world.when_failed(move || left.release_nothing());
        let mesh = Arc::new(Mesh::connect(rendezvous, world, &inbox, name)?);
        inbox.answer_by(&mesh);
        // Nothing is sent before all can answer.
        rendezvous.barrier(&format!("parts {name}"))?;
        let (world, device) = (world.clone(), device.clone());
        let (exports, shifts) = (Mutex::default(), Mutex::default());
        let connected = Connected { world, rank, device, inbox, rings, mesh, exports, shifts };
        Ok(Self { connected: Arc::new(connected), gone: Arc::default() })
    }

    /// What the others publish, and this rank.
    pub(super) fn board(&self) -> &Arc<Board<Part>> {
        self.connected.inbox.board()
    }

    /// What the others have published of collectives that they have made ready, and this rank.
    pub(super) fn ready(&self) -> &Arc<ReadyParts> {
        self.connected.inbox.ready()
    }

    /// Who takes in what the others write into memory that they share with this rank.
    pub(super) fn listener(&self) -> &dyn Listener {
        &*self.connected.inbox
    }

    /// The same, shared.
    pub(super) fn hearing(&self) -> Arc<dyn Listener + Send + Sync> {
        self.connected.inbox.clone()
    }

    /// What a collective with this number drops last.
    pub(super) fn departure(&self, number: u64, stand_ins: &Arc<StandIns>) -> Departure {
        Departure { number, gone: self.gone.clone(), stand_ins: stand_ins.clone() }
    }

    /// Publishes, to those that this rank exchanges rows with, its part in a collective that is ready: the rows, and memory that they write to;
    /// and which collectives are gone.
    pub(super) fn send_ready(&self, post: &Post<Part>) -> Result<(), CallError> {
        let Post { place, collective, payload, .. } = post;
        let Collective { contract, pattern, .. } = &**collective;
        let mut exports = lock(&self.connected.exports);
        for number in std::mem::take(&mut *lock(&self.gone)) {
            let mut peers = exports.forget(number).into_iter();
            peers.try_for_each(|peer| self.connected.mesh.send(peer, &PartMessage::Gone { number }, &[]))?;
        }
        let number = payload.number;
        for peer in self.connected.peers_of(pattern) {
            let mut memory = |buffer: &DeviceBuffer| self.connected.send_memory(&mut exports, peer, buffer);
            let staging = payload.staging.as_ref().map(&mut memory).transpose()?;
            let mailbox = payload.mailbox.as_ref().map(&mut memory).transpose()?;
            let (place, contract, rows) = (place.clone(), contract.clone(), pattern.bytes_for(peer));
            let message = PartMessage::Ready { number, place, contract, staging, mailbox };
            exports.send(peer, Sent::Ready(number), || self.connected.mesh.send(peer, &message, &[&rows]))?;
        }
        Ok(())
    }

    /// Notifies the others of a pattern that this rank calls the collective with this number, of which they know all.
    pub(super) fn send_call(&self, sequence: u64, number: u64, pattern: &Pattern) -> Result<(), ExecError> {
        self.connected.peers_of(pattern).into_iter().try_for_each(|peer| {
            match self.connected.rings.write(peer, [sequence, number]) {
                true => Ok(()),
                false => self.connected.mesh.send(peer, &PartMessage::Call { sequence, number }, &[]),
            }
        })
    }

    /// Announces, to those that this rank exchanges rows with, its part in a call of a collective, whose rows they know.
    pub(super) fn send_post(
        &self,
        sequence: u64,
        post: &Post<Part>,
        readers: Readers<'_>,
    ) -> Result<(), CallError> {
        let Post { collective, payload, .. } = post;
        let number = payload.number;
        let mut exports = lock(&self.connected.exports);
        for peer in self.connected.peers_of(&collective.pattern) {
            let send = |message: &PartMessage| self.connected.mesh.send(peer, message, &[]);
            let numbers = events_of(number);
            if let Some(Marks { ready, done }) = &payload.marks {
                for (number, event) in numbers.into_iter().zip([ready, done]) {
                    exports.send::<CallError>(peer, Sent::Event(number), || {
                        Ok(send(&PartMessage::Event { number, handle: event.handle()? })?)
                    })?;
                }
            }
            let mut memory = |buffer: &DeviceBuffer| self.connected.send_memory(&mut exports, peer, buffer);
            let mut tensors = |buffers: &[CudaBuffer]| -> Result<Vec<TensorPlace>, CallError> {
                let tensor = |buffer: &CudaBuffer| {
                    let (shape, dtype) = (buffer.shape().to_vec(), buffer.dtype());
                    Ok(TensorPlace { memory: memory(buffer.memory())?, shape, dtype })
                };
                buffers.iter().map(tensor).collect()
            };
            let (inputs, outputs) = match readers.contain(peer) {
                true => (tensors(&payload.inputs)?, tensors(&payload.outputs)?),
                false => (Vec::new(), Vec::new()),
            };
            let staging = payload.staging.as_ref().map(&mut memory).transpose()?;
            let mailbox = payload.mailbox.as_ref().map(&mut memory).transpose()?;
            let marks = payload.marks.as_ref().map(|_| numbers);
            send(&PartMessage::Part { sequence, number, marks, inputs, outputs, staging, mailbox })?;
        }
        Ok(())
    }

    /// Notifies `peer` that this rank has enqueued its use of what that one published.
    pub(super) fn used(&self, peer: usize, sequence: u64) -> Result<(), ExecError> {
        self.connected.mesh.send(peer, &PartMessage::Used { sequence }, &[])
    }

    /// Has `peers` open the allocations of what will be announced to them.
    pub(super) fn publish_memory(
        &self,
        announced: &[DeviceBuffer],
        peers: &[usize],
    ) -> Result<(), CallError> {
        let mut exports = lock(&self.connected.exports);
        for peer in peers.iter().copied().filter(|peer| *peer != self.connected.rank) {
            for buffer in announced {
                self.connected.send_memory(&mut exports, peer, buffer)?;
            }
        }
        Ok(())
    }

    /// What is added to the addresses of `announced` for each of `peers`, once those have opened the allocations, for what is enqueued on
    /// `queue` from now on. It goes to the device by `setup`.
    pub(super) fn shifts(
        &self,
        place: &OpPlace,
        (setup, queue): (&Stream, &Stream),
        announced: &[DeviceBuffer],
        peers: &[usize],
    ) -> Result<LinkShifts, CallError> {
        let allocation = |buffer: &DeviceBuffer| match buffer.is_empty() {
            true => Ok(None),
            false => AllocationPlace::of(&self.connected.device, buffer.address()).map(Some),
        };
        let allocations: Vec<Option<AllocationPlace>> =
            announced.iter().map(allocation).collect::<Result<_, _>>()?;
        let ids: Vec<u64> = allocations.iter().map(|place| place.map_or(0, |place| place.id)).collect();
        let key = (ids, peers.to_vec());
        let known = lock(&self.connected.shifts).get(&key).cloned();
        if let Some(shifts) = known {
            shifts.lists.follow(queue)?;
            return Ok(shifts.table.clone());
        }
        self.publish_memory(announced, peers)?;
        let mut shifts = Vec::new();
        for peer in peers.iter().copied().filter(|peer| *peer != self.connected.rank) {
            for (tensor, allocation) in allocations.iter().enumerate() {
                let Some(AllocationPlace { id, base, .. }) = allocation else { continue };
                let began = Instant::now();
                let found = self.connected.inbox.base_for(peer, *id)?;
                let found = found.ok_or_else(|| self.connected.unanswered(place, peer, began))?;
                shifts.push((peer, tensor, found.wrapping_sub(*base)));
            }
        }
        let lists = Lists::new(&self.connected.device)?;
        let table = lists.upload(setup, |setup| LinkShifts::new(setup, shifts))?;
        let made =
            lock(&self.connected.shifts).entry(key).or_insert(Arc::new(Shifts { table, lists })).clone();
        made.lists.follow(queue)?;
        Ok(made.table.clone())
    }
}

impl Connected {
    /// The other ranks of a pattern, ascending.
    fn peers_of(&self, pattern: &Pattern) -> Vec<usize> {
        let mut peers = pattern.peers();
        peers.retain(|peer| *peer != self.rank);
        peers
    }

    fn send_memory(
        &self,
        exports: &mut Exports,
        peer: usize,
        buffer: &DeviceBuffer,
    ) -> Result<MemoryPlace, CallError> {
        let place = exports.place(&self.device, buffer)?;
        if let Some((number, message)) = place.number.and_then(|at| Some((at, exports.message(at)?))) {
            exports.send(peer, Sent::Memory(number), || self.mesh.send(peer, &message, &[]))?;
        }
        Ok(place)
    }

    fn unanswered(&self, place: &OpPlace, peer: usize, began: Instant) -> ExecError {
        let awaited = Awaited {
            name: format!("rank {peer}"),
            evidence: format!("rank {peer} has not opened the memory of rank {}", self.rank),
            blocker: Some(Blocker::Rank(peer)),
        };
        self.world.stalled(self.rank, place.to_string(), began, awaited)
    }

    /// Closes what the others have published, notifies them, and waits until they have closed what this rank has published, which then may be
    /// freed. What is enqueued here ends first.
    fn leave(&self) {
        let closed = || -> Result<(), CallError> {
            let mut given = None;
            while !self.has_ended(&mut given)? {
                self.world.check()?;
                thread::sleep(LOOK);
            }
            self.world.check()?;
            self.inbox.close();
            let others = (0..self.world.size()).filter(|peer| *peer != self.rank);
            others.clone().try_for_each(|peer| self.mesh.send(peer, &PartMessage::Closed, &[]))?;
            Ok(self.inbox.all_closed(others.count())?)
        };
        if closed().is_err() {
            self.give_up();
        }
    }

    /// Whether the device has done all that it had been given when this was first asked.
    fn has_ended(&self, given: &mut Option<GivenWork>) -> Result<bool, CudaError> {
        if given.is_none() {
            *given = self.device.given_work()?;
        }
        given.as_mut().map_or(Ok(false), |given| self.device.has_ended(given))
    }

    /// Somebody may still have it open, which ends with this process, as does the memory.
    fn give_up(&self) {
        self.device.release_nothing();
        std::mem::forget(std::mem::take(&mut *lock(&self.exports)));
    }
}

impl Drop for PeerProcesses {
    fn drop(&mut self) {
        let leaving = self.connected.clone();
        // This process may end before the thread has closed anything.
        leaving.mesh.say_farewell();
        let name = format!("rank {} leaves", leaving.rank);
        // Who panics has notified nobody yet, and nobody would close anything. Once the job has failed there is nothing to wait for, and the
        // device may hold up whoever asks it.
        let goes_at_once = thread::panicking() || leaving.world.has_failed();
        let inside = Inside::enter();
        let leave = move || {
            leaving.leave();
            // What is freed here waits for the device.
            drop(leaving);
            drop(inside);
        };
        let is_leaving = !goes_at_once && thread::Builder::new().name(name).spawn(leave).is_ok();
        if !is_leaving {
            self.connected.give_up();
        }
    }
}
