//! The one thread of a process that calls MPI, and the queues to and from it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::request::{Request, Scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Destination, Equivalence, Source};
use serde::{Deserialize, Serialize};

use crate::cpu_transport::{Inbox, PeerMessage};
use crate::frame::{frame_length, read_frame, write_frame};
use crate::monitor::lock;
use crate::world::{World, after};
use crate::{ConnectionFault, DeviceFault, ExecError, Recipient, RendezvousError};

/// Between two looks, when there was nothing to do.
const PAUSE: Duration = Duration::from_micros(50);
/// Bytes of one message of MPI, which counts in 32 bits. Longer ones travel in pieces, which arrive in order.
const PIECE: usize = 256 << 20;
/// The messages' tag.
const TAG: i32 = 7;

/// The thread that calls MPI, and the way to it.
pub(super) struct Messenger {
    rank: usize,
    world_size: usize,
    limit: Duration,
    /// `None` once it is to end.
    orders: Mutex<Option<mpsc::Sender<Outgoing>>>,
    inboxes: Arc<Inboxes>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

type Inboxes = Mutex<BTreeMap<u64, (Weak<World>, Inbox)>>;

struct Outgoing {
    peer: usize,
    bytes: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    connection: u64,
    message: PeerMessage,
}

impl Messenger {
    /// Starts MPI on a thread of its own.
    pub(super) fn start(rank: usize, world_size: usize, limit: Duration) -> Result<Self, ExecError> {
        let (orders, queue) = mpsc::channel();
        let (started, starting) = mpsc::channel();
        let inboxes: Arc<Inboxes> = Arc::default();
        let delivering = inboxes.clone();
        let work = move || {
            let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Funneled) else {
                started.send(Err(DeviceFault::StartedAlready)).ok();
                return;
            };
            let world = universe.world();
            let found = (world.rank() as usize, world.size() as usize);
            let suits = threading != Threading::Single && found == (rank, world_size);
            let reason = || DeviceFault::OtherRank {
                rank: found.0,
                ranks: found.1,
                threading: format!("{threading:?}"),
            };
            started.send(if suits { Ok(()) } else { Err(reason()) }).ok();
            if suits {
                Post { world: &world, queue: &queue, inboxes: &delivering, parcels: BTreeMap::new(), rank }
                    .run();
            }
            end(universe, &world, limit);
        };
        let place = || "starting MPI".to_owned();
        let thread = thread::Builder::new()
            .name(format!("rank {rank} MPI"))
            .spawn(work)
            .map_err(|error| ExecError::Thread { rank, stream: "MPI".to_owned(), text: error.to_string() })?;
        match starting.recv_timeout(limit) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => return Err(ExecError::Device { rank, place: place(), reason }),
            Err(_) => {
                let reason = DeviceFault::NotStarted { limit };
                return Err(ExecError::Device { rank, place: place(), reason });
            }
        }
        let (orders, thread) = (Mutex::new(Some(orders)), Mutex::new(Some(thread)));
        Ok(Self { rank, world_size, limit, orders, inboxes, thread })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.world_size
    }

    /// Messages of connection `number` go to `inbox` from now on.
    pub(super) fn open(&self, number: u64, world: &Arc<World>, inbox: &Inbox) {
        lock(&self.inboxes).insert(number, (Arc::downgrade(world), inbox.clone()));
    }

    /// Messages of connection `number` mean nothing any more.
    pub(super) fn close(&self, number: u64) {
        lock(&self.inboxes).remove(&number);
    }

    pub(super) fn send(
        &self,
        peer: usize,
        connection: u64,
        message: &PeerMessage,
        payload: &[&[u8]],
    ) -> Result<(), ExecError> {
        let broken = |reason| {
            let doing = format!("sending in connection {connection}");
            ExecError::from(RendezvousError::Connection { rank: self.rank, peer, reason, doing })
        };
        let mut bytes = Vec::new();
        let envelope = Envelope { connection, message: message.clone() };
        write_frame(&mut bytes, &envelope, payload)
            .map_err(|error| broken(ConnectionFault::system(error)))?;
        let sent = lock(&self.orders).as_ref().map(|orders| orders.send(Outgoing { peer, bytes }));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(broken(ConnectionFault::MpiEnded)),
        }
    }
}

impl Messenger {
    /// Lets the thread send what it has and end MPI, for the limit.
    pub(super) fn finish(&self) {
        lock(&self.orders).take();
        let deadline = after(Instant::now(), self.limit);
        let Some(thread) = lock(&self.thread).take() else { return };
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(PAUSE);
        }
    }
}

/// Ends MPI once all ranks have come so far. One that does not come must not hold up the others: MPI is left as it is then.
fn end(universe: Universe, world: &SimpleCommunicator, limit: Duration) {
    let deadline = after(Instant::now(), limit);
    let mut barrier = world.immediate_barrier();
    loop {
        match barrier.test() {
            Ok(_) => return drop(universe),
            Err(waiting) => barrier = waiting,
        }
        if Instant::now() >= deadline {
            std::mem::forget(barrier);
            return std::mem::forget(universe);
        }
        thread::sleep(PAUSE);
    }
}

/// What the thread has at hand.
struct Post<'a> {
    world: &'a SimpleCommunicator,
    queue: &'a mpsc::Receiver<Outgoing>,
    inboxes: &'a Inboxes,
    /// By sender: what has come of messages that are not yet whole.
    parcels: BTreeMap<usize, Vec<u8>>,
    rank: usize,
}

impl Post<'_> {
    /// Sends and receives until there is nobody to give orders.
    fn run(&mut self) {
        loop {
            let mut batch = Vec::new();
            let is_over = loop {
                match self.queue.try_recv() {
                    Ok(outgoing) => batch.push(outgoing),
                    Err(mpsc::TryRecvError::Empty) => break false,
                    Err(mpsc::TryRecvError::Disconnected) => break true,
                }
            };
            let was_idle = batch.is_empty();
            self.send(&batch);
            if !self.receive() && was_idle {
                if is_over {
                    return;
                }
                thread::sleep(PAUSE);
            }
        }
    }

    /// Sends all, and receives meanwhile: two ranks that send each other much must both make room.
    fn send(&mut self, batch: &[Outgoing]) {
        if batch.is_empty() {
            return;
        }
        mpi::request::scope(|scope| {
            let pieces = batch
                .iter()
                .flat_map(|outgoing| outgoing.bytes.chunks(PIECE).map(move |piece| (outgoing.peer, piece)));
            let mut sending: Vec<_> = pieces
                .map(|(peer, piece)| {
                    self.world.process_at_rank(peer as i32).immediate_send_with_tag(scope, piece, TAG)
                })
                .collect();
            while !sending.is_empty() {
                sending = sending.into_iter().filter_map(|request| request.test().err()).collect();
                if !self.receive() && !sending.is_empty() {
                    thread::sleep(PAUSE);
                }
            }
        });
    }

    /// Takes one message, where there is one.
    fn receive(&mut self) -> bool {
        let Some((message, status)) = self.world.any_process().immediate_matched_probe_with_tag(TAG) else {
            return false;
        };
        let mut piece = vec![0u8; status.count(u8::equivalent_datatype()) as usize];
        mpi::request::scope(|scope| poll(message.immediate_matched_receive_into(scope, &mut piece[..])));
        let peer = status.source_rank() as usize;
        let parcel = self.parcels.entry(peer).or_default();
        parcel.extend_from_slice(&piece);
        self.deliver(peer);
        true
    }

    /// Gives out the whole messages of a parcel.
    fn deliver(&mut self, peer: usize) {
        let mut parcel = self.parcels.remove(&peer).unwrap_or_default();
        while let Some(length) = frame_length(&parcel).filter(|&length| length <= parcel.len()) {
            let frame: Vec<u8> = parcel.drain(..length).collect();
            let opened = read_frame::<Envelope>(&mut frame.as_slice());
            let (connection, result) = match opened {
                Ok(Some((Envelope { connection, message }, payload))) => {
                    // Connections that are over still get what their ranks have no part in.
                    let Some((_, inbox)) = lock(self.inboxes).get(&connection).cloned() else { continue };
                    (Some(connection), inbox.receive(peer, message, &payload))
                }
                Ok(None) => continue,
                Err(error) => (None, Err(ConnectionFault::system(error))),
            };
            if let Err(reason) = result {
                self.fail(connection, peer, &reason);
            }
        }
        self.parcels.insert(peer, parcel);
    }

    /// Fails the world of a connection, or of all.
    fn fail(&self, connection: Option<u64>, peer: usize, reason: &ConnectionFault) {
        let inboxes = lock(self.inboxes);
        let worlds: Vec<Arc<World>> = inboxes
            .iter()
            .filter(|(number, _)| connection.is_none_or(|connection| connection == **number))
            .filter_map(|(_, (world, _))| world.upgrade())
            .collect();
        drop(inboxes);
        for world in worlds {
            let (reason, doing) = (reason.clone(), world.activity_of(self.rank).doing);
            world.fail(RendezvousError::Connection { rank: self.rank, peer, reason, doing }.into());
        }
    }
}

fn poll<'a, D: ?Sized, S: Scope<'a>>(mut request: Request<'a, D, S>) {
    loop {
        match request.test() {
            Ok(_) => return,
            Err(waiting) => request = waiting,
        }
        thread::sleep(Duration::from_micros(5));
    }
}
