//! CPU ranks that are processes and send each other rows through TCP: one connection a pair of ranks, and for each a thread
//! that takes what arrives, so that a rank that sends never waits for one that computes.

mod loopback;
mod mesh;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use counterpoint_choose::LinearMachine;
use rayon::ThreadPool;

pub use self::loopback::TcpLoopback;
pub use self::mesh::Mesh;
use crate::cpu_transport::Inbox;
use crate::machine::linear_on_cpus;
use crate::memory::check_memory;
use crate::{CpuBackend, CpuTransport, Ends, ExecError, Machine, OpPlace, Rendezvous, SlowLink, World};

/// One CPU rank of several that are processes. Those of one host share its cores.
pub struct TcpMachine {
    rendezvous: Arc<Rendezvous>,
    workers: Arc<ThreadPool>,
    slow_link: Option<SlowLink>,
    /// Meshes made so far, the same number on every rank.
    meshes: AtomicU64,
}

impl TcpMachine {
    /// Leaves `sm_margin` of this rank's cores free; the transport imitates `slow_link`.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives no threads.
    pub fn new(
        rendezvous: Arc<Rendezvous>,
        sm_margin: usize,
        slow_link: Option<SlowLink>,
    ) -> Result<Self, ExecError> {
        let ranks = rendezvous.ranks_on_this_host().len();
        let workers = CpuBackend::workers_of(ranks, sm_margin)?;
        Ok(Self { rendezvous, workers, slow_link, meshes: AtomicU64::new(0) })
    }
}

impl Machine for TcpMachine {
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
        let inbox = Arc::new(Inbox::new(world, rank));
        let number = self.meshes.fetch_add(1, Ordering::Relaxed);
        let mesh = Mesh::connect(&self.rendezvous, world, &inbox, &number.to_string());
        let mesh = mesh.map_err(|error| world.fail(error))?;
        let transport = CpuTransport::remote(world, rank, Arc::new(mesh), &inbox, self.slow_link);
        Ok(vec![(CpuBackend::new(world, rank, self.workers.clone()), transport)])
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(ranks.saturating_add(host))
    }
}

/// The place of what goes wrong before there is a collective.
fn connecting() -> OpPlace {
    OpPlace::new(0, "connecting the ranks")
}
