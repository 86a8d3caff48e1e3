//! CPU ranks that are processes and send each other rows through MPI, on any number of hosts that it reaches.
//!
//! One thread of the process calls MPI, and nothing that it calls waits: messages are sent and received by `MPI_Isend` and
//! `MPI_Imrecv`, and polled. Whoever waits for a message waits on the board, with the world's limit. Ranks still join at the
//! [`Rendezvous`], which notifies all of an error and notices a process that is gone.

mod messenger;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use counterpoint_choose::LinearMachine;
use rayon::ThreadPool;

use self::messenger::Messenger;
use crate::cpu_transport::{Courier, Inbox, PeerMessage};
use crate::machine::linear_on_cpus;
use crate::memory::check_memory;
use crate::{CpuBackend, CpuTransport, Ends, ExecError, Machine, Rendezvous, SlowLink, World};

/// One CPU rank of several that an MPI launcher started. A process has one in its life, as it can start MPI once only.
pub struct MpiMachine {
    rendezvous: Arc<Rendezvous>,
    workers: Arc<ThreadPool>,
    slow_link: Option<SlowLink>,
    messenger: Arc<Messenger>,
    /// Connections made so far, the same number on every rank.
    connections: AtomicU64,
}

impl MpiMachine {
    /// Starts MPI. Leaves `sm_margin` of this rank's cores free; the transport imitates `slow_link`.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives no threads; [`ExecError::Device`] when MPI does not start within the limit,
    /// or counts its ranks otherwise than the rendezvous.
    pub fn new(
        rendezvous: Arc<Rendezvous>,
        sm_margin: usize,
        slow_link: Option<SlowLink>,
    ) -> Result<Self, ExecError> {
        let ranks = rendezvous.ranks_on_this_host().len();
        let workers = CpuBackend::workers_of(ranks, sm_margin)?;
        let (rank, world_size) = (rendezvous.rank(), rendezvous.world_size());
        let messenger = Messenger::start(rank, world_size, rendezvous.limit());
        let messenger = Arc::new(messenger.map_err(|error| rendezvous.fail(error))?);
        Ok(Self { rendezvous, workers, slow_link, messenger, connections: AtomicU64::new(0) })
    }
}

impl Machine for MpiMachine {
    type Backend = CpuBackend;
    type Transport = CpuTransport;

    fn world_size(&self) -> Option<usize> {
        Some(self.rendezvous.world_size())
    }

    fn ranks_here(&self, _: usize) -> Range<usize> {
        self.rendezvous.rank()..self.rendezvous.rank() + 1
    }

    fn barrier(&self, place: &str) -> Result<(), ExecError> {
        // Operations start when they are enqueued: there is nothing to hold.
        self.rendezvous.start_together(place, Duration::ZERO).map(drop)
    }

    /// The ends of this process's rank. All ranks must call it, as often as each other.
    fn linear(&self, ranks: usize) -> LinearMachine {
        linear_on_cpus(ranks, self.slow_link)
    }

    fn connect(&self, world: &Arc<World>) -> Result<Vec<Ends<Self>>, ExecError> {
        let rank = self.rendezvous.rank();
        self.rendezvous.attach(world)?;
        let inbox = Inbox::new(world, rank);
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        self.messenger.open(number, world, &inbox);
        let connection = Connection { messenger: self.messenger.clone(), number };
        // What comes before the inbox is there would be lost.
        let place = format!("connections {number}");
        self.rendezvous.barrier(&place).map_err(|error| world.fail(error))?;
        let transport = CpuTransport::remote(world, rank, Arc::new(connection), &inbox, self.slow_link);
        Ok(vec![(CpuBackend::new(world, rank, self.workers.clone()), transport)])
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(ranks.saturating_add(host))
    }
}

impl Drop for MpiMachine {
    fn drop(&mut self) {
        // Not left to the last handle, which an operation may hold past the end of the program.
        self.messenger.finish();
    }
}

/// The messages of one transport among those of all.
struct Connection {
    messenger: Arc<Messenger>,
    number: u64,
}

impl Courier for Connection {
    fn world_size(&self) -> usize {
        self.messenger.world_size()
    }

    fn send(&self, peer: usize, message: &PeerMessage, payload: &[&[u8]]) -> Result<(), ExecError> {
        self.messenger.send(peer, self.number, message, payload)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let others = (0..self.world_size()).filter(|peer| *peer != self.messenger.rank());
        // Once MPI has ended there is no one to notify.
        others.for_each(|peer| drop(self.messenger.send(peer, self.number, &PeerMessage::Left, &[])));
        self.messenger.close(self.number);
    }
}
