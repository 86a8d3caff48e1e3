//! One GPU rank of several that are processes.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use counterpoint_choose::{LinearMachine, Offered};
use counterpoint_cost::CostModel;
use counterpoint_exec::{ElementTypes, Ends, ExecError, Facet, Machine, Rendezvous, World, check_memory};
use counterpoint_plan::Topology;
use serde::{Deserialize, Serialize};

use super::cost;
use super::gpus::{ELEMENT_TYPES, NUM_SMS};
use super::lender::lender;
use crate::backend::rank::OtherKernels;
use crate::backend::start_gate::StartPace;
use crate::backend::{CudaBackend, PlainProducts, Timing, exec_error};
use crate::kernel::{LINK_BLOCKS, LINK_RANKS};
use crate::transport::{Level, LevelledTransport, Means};
use crate::{
    CudaError, CudaTransport, Device, DeviceBuffer, EngineUse, TransportFault, TransportKind, Unreached,
    compiler_version,
};
use counterpoint_driver::{AllocationPlace, OpenedMemory};
use counterpoint_driver::{DeviceAllocator, Lender};
use counterpoint_nccl::{ConnectedRanks, NcclRank, NcclSeat};

/// One GPU rank of several that are processes.
pub struct CudaProcess {
    rendezvous: Arc<Rendezvous>,
    device: Device,
    timing: Timing,
    /// Never [`TransportKind::Auto`].
    transport: TransportKind,
    num_sms: u32,
    engines: EngineUse,
    others: OtherKernels,
    topology: Topology,
    /// Ranks of the GPU that has most.
    sharing: usize,
    /// Whether kernels of all ranks that reach each other's memory can wait for each other.
    has_barriers: bool,
    /// What NCCL is given as this process's host, where not what it finds.
    nccl_host: Option<String>,
    /// Connections made so far, the same number on every rank.
    connections: AtomicU64,
    /// Of NCCL, for the next world.
    connected: ConnectedRanks,
    /// Bytes that this rank has sent through NCCL.
    sent: Arc<AtomicU64>,
    /// How long its runs are held, whatever runs.
    pace: Arc<StartPace>,
    /// Whose memory the rank has, where not the driver's.
    lender: Option<Arc<Lender>>,
}

/// What a rank publishes of its GPU.
#[derive(Serialize, Deserialize)]
struct Seat {
    uuid: String,
    is_hopper: bool,
    /// A little of its memory, for the others to open: `None` where the driver does not share it.
    probe: Option<Vec<u8>>,
}

/// Bytes of that memory: an allocation that shares nothing with another.
const PROBE_BYTES: usize = 2 << 20;

impl CudaProcess {
    /// This process's rank on its GPU: that with the number `local_rank`, its place among the ranks of its host where the
    /// launcher does not say, counted round when there are fewer GPUs. All ranks call it, with the same `transport` and
    /// `topology`, whose nodes need not be hosts: NCCL is made to believe that they are.
    ///
    /// # Errors
    /// When there is no driver, GPU or compiler; [`CudaError::Transport`] for a transport that these ranks cannot use, memory
    /// out of reach among its reasons; whatever ended the job.
    pub fn new(
        rendezvous: &Arc<Rendezvous>,
        local_rank: Option<usize>,
        timing: Timing,
        transport: TransportKind,
        topology: Topology,
    ) -> Result<Self, ExecError> {
        let rank = rendezvous.rank();
        let neighbours = rendezvous.ranks_on_this_host();
        let place = neighbours.iter().position(|neighbour| *neighbour == rank).unwrap_or(0);
        let failed = |error| rendezvous.fail(exec_error(rank, "the GPU of a rank", error));
        rendezvous.agree("transport", &[Facet::new("the transport", transport)])?;
        let open = || -> Result<(Device, DeviceBuffer), CudaError> {
            compiler_version()?;
            let device = Device::open(local_rank.unwrap_or(place) % Device::count()?)?;
            let probe = DeviceBuffer::new(&device, PROBE_BYTES)?;
            Ok((device, probe))
        };
        let (device, probe) = open().map_err(failed)?;
        let handle = AllocationPlace::of(&device, probe.address()).and_then(|place| place.handle(&device));
        let seat = Seat {
            uuid: device.properties().uuid.clone(),
            is_hopper: device.arch().is_hopper(),
            probe: handle.ok(),
        };
        let seats: Vec<Seat> = rendezvous.gather("GPUs", &seat)?;
        // Ranks that are to reach this one's memory.
        let is_near = |other: usize| match transport {
            TransportKind::Nvlink | TransportKind::CopyEngine | TransportKind::Nccl(_) => true,
            _ => topology.node(other) == topology.node(rank),
        };
        let near: Vec<usize> = (0..seats.len()).filter(|other| *other != rank && is_near(*other)).collect();
        let reached = reach(&device, rank, &near, &neighbours, &seats);
        let unreached: Vec<Option<Unreached>> = rendezvous.gather("memory of GPUs", &reached.err())?;
        // Nobody's memory goes before all have closed it.
        rendezvous.barrier("memory of GPUs closed")?;
        drop(probe);
        let count = |near: &dyn Fn(usize, usize) -> bool| {
            let same = |a: usize, b: usize| near(a, b) && seats[a].uuid == seats[b].uuid;
            let sharers = (0..seats.len()).map(|a| (0..seats.len()).filter(|b| same(a, *b)).count());
            sharers.max().unwrap_or(1)
        };
        let sharing = count(&|_, _| true);
        let engines = if transport == TransportKind::Auto { EngineUse::H200 } else { EngineUse::NEVER };
        let transport = choose(transport, unreached.into_iter().flatten().next(), topology, sharing);
        let transport = transport.map_err(failed)?;
        let sharing_near = match transport {
            TransportKind::Hierarchical(_) => count(&|a, b| topology.node(a) == topology.node(b)),
            _ => sharing,
        };
        let has_barriers = sharing_near == 1
            && seats.iter().all(|seat| seat.is_hopper)
            && (2..=LINK_RANKS).contains(&seats.len());
        let imitated = neighbours.iter().any(|other| topology.node(*other) != topology.node(rank));
        // Ranks that share a GPU must not find each other on one host.
        let nccl_host = match (transport, sharing > 1) {
            (TransportKind::Hierarchical(_), true) => Some(format!("rank {rank}")),
            (_, false) if imitated => Some(format!("node {}", topology.node(rank))),
            _ => None,
        };
        Ok(Self {
            rendezvous: rendezvous.clone(),
            device,
            timing,
            transport,
            num_sms: NUM_SMS,
            engines,
            others: OtherKernels::default(),
            topology,
            sharing,
            has_barriers,
            nccl_host,
            connections: AtomicU64::new(0),
            connected: ConnectedRanks::default(),
            sent: Arc::default(),
            pace: Arc::default(),
            lender: None,
        })
    }

    /// The same, whose transport's kernels take at most `num_sms` multiprocessors, and never more than 1,024.
    #[must_use]
    pub fn with_num_sms(mut self, num_sms: u32) -> Self {
        self.num_sms = num_sms.clamp(1, LINK_BLOCKS);
        self
    }

    /// As [`CudaMachine::with_engines`](crate::CudaMachine::with_engines).
    #[must_use]
    pub fn with_engines(mut self, engines: EngineUse) -> Self {
        self.engines = engines;
        self
    }

    /// As [`CudaMachine::with_plain_products`](crate::CudaMachine::with_plain_products). All ranks take the same.
    #[must_use]
    pub fn with_plain_products(mut self, by: PlainProducts) -> Self {
        self.others.plain_products = by;
        self
    }

    /// As [`CudaMachine::with_allocator`](crate::CudaMachine::with_allocator). A rank among several keeps to the driver's memory, which
    /// the others can open.
    ///
    /// # Errors
    /// When the driver has no stream left.
    pub fn with_allocator(mut self, allocator: Arc<dyn DeviceAllocator>) -> Result<Self, CudaError> {
        if self.rendezvous.world_size() == 1 {
            self.lender = Some(lender(&self.device, allocator)?);
        }
        Ok(self)
    }

    /// This rank's GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How ranks exchange rows.
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    /// What work costs: as `measured` of this GPU, or else an estimate to plan with.
    pub fn cost(&self, measured: Option<&CostModel>) -> CostModel {
        let one = measured.copied().unwrap_or_else(|| cost::estimate(self.device.sm_count()));
        cost::shared(one, self.sharing)
    }

    /// Bytes of rows that this rank has sent to other nodes so far; `None` where its transport does not distinguish them from others.
    pub fn sent_between_nodes(&self) -> Option<u64> {
        matches!(self.transport, TransportKind::Hierarchical(_)).then(|| self.sent.load(Ordering::Relaxed))
    }

    /// What moves this rank's rows, and to whom.
    fn means(
        &self,
        world: &Arc<World>,
        device: &Device,
        number: u64,
    ) -> Result<Vec<(Level, Means)>, ExecError> {
        Ok(match self.transport {
            TransportKind::Nccl(_) => vec![(Level::World, self.nccl(world, device, number)?)],
            TransportKind::CopyEngine => vec![(Level::World, Means::Push)],
            TransportKind::Nvlink | TransportKind::Auto => vec![(Level::World, self.nvlink())],
            TransportKind::Hierarchical(_) => {
                let each = self.topology.ranks_per_node;
                let first = self.topology.node(self.rendezvous.rank()) * each;
                let node = first..(first + each).min(self.topology.world_size);
                let inside = (Level::Node(node.clone()), self.nvlink());
                vec![inside, (Level::OtherNodes(node), self.nccl(world, device, number)?)]
            }
        })
    }

    fn nvlink(&self) -> Means {
        match self.has_barriers {
            true => Means::Link { num_sms: self.num_sms, engines: self.engines },
            false => Means::Pull,
        }
    }

    fn nccl(&self, world: &Arc<World>, device: &Device, number: u64) -> Result<Means, ExecError> {
        let rank = self.rendezvous.rank();
        let seat = NcclSeat {
            connected: &self.connected,
            device,
            rank,
            host: self.nccl_host.as_deref(),
            world,
            settings: self.transport.nccl().unwrap_or_default(),
            sent: &self.sent,
        };
        // A rank that could not end an exchange has none left of its connection, so that all must have it.
        let own = NcclRank::connections(&self.connected);
        let all: Vec<Vec<u64>> = self.rendezvous.gather(&format!("nccl connections {number}"), &own)?;
        let common =
            own.into_iter().filter(|number| all.iter().all(|numbers| numbers.contains(number))).max();
        let joined = match common {
            Some(number) => NcclRank::join_again(&seat, number),
            None => {
                let own = match rank {
                    0 => NcclRank::unique_id(&seat).map_err(|error| self.unconnected(error))?,
                    _ => Vec::new(),
                };
                // Here a rank that never comes has a name.
                let unique_id = self.rendezvous.all_gather(&format!("nccl {number}"), &own)?.swap_remove(0);
                NcclRank::join(seat, number, &unique_id)
            }
        };
        let sums = self.transport.nccl().unwrap_or_default().sums;
        let exchange = |nccl| Means::Exchange { nccl, sums };
        joined.map(exchange).map_err(|error| self.unconnected(error))
    }

    fn unconnected(&self, error: CudaError) -> ExecError {
        exec_error(self.rendezvous.rank(), "the connection of ranks", error)
    }
}

impl Machine for CudaProcess {
    type Backend = CudaBackend;
    type Transport = LevelledTransport;

    fn world_size(&self) -> Option<usize> {
        Some(self.rendezvous.world_size())
    }

    fn element_types(&self) -> ElementTypes {
        ELEMENT_TYPES
    }

    fn ranks_here(&self, _: usize) -> Range<usize> {
        self.rendezvous.rank()..self.rendezvous.rank() + 1
    }

    fn linear(&self, _: usize) -> LinearMachine {
        let has_barriers = self.has_barriers && self.topology.nodes() == 1;
        let overlaps = self.transport.pass_overlaps(has_barriers, self.transport.workers(self.num_sms));
        LinearMachine::new(self.transport.transport(), overlaps, self.topology, self.cost(None))
            .with_column_groups(Offered::Tuned)
            .with_arriving_rows(Offered::Tuned)
    }

    fn barrier(&self, place: &str) -> Result<(), ExecError> {
        let start = self.rendezvous.start_together(place, self.pace.wish())?;
        self.pace.agree(start);
        Ok(())
    }

    /// The ends of this process's rank. All ranks must call it, as often as each other.
    fn connect(&self, world: &Arc<World>) -> Result<Vec<Ends<Self>>, ExecError> {
        let rank = self.rendezvous.rank();
        self.rendezvous.attach(world)?;
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        let connect = || {
            let (rendezvous, device) = (&self.rendezvous, &self.device.for_world_of(self.lender.as_ref()));
            let means = self.means(world, device, number)?;
            let level = |(level, means): (Level, Means)| {
                let name = format!("{number} {}", level.name());
                let transport = CudaTransport::connect_process(rendezvous, world, device, &name, means)?;
                Ok((level, transport))
            };
            let levels = means.into_iter().map(level).collect::<Result<_, ExecError>>()?;
            let (clock, others, pace) = (Arc::default(), self.others.clone(), self.pace.clone());
            let backend = CudaBackend::new(world, rank, device, self.timing, clock, others, pace)?;
            if self.sharing == 1 {
                backend.let_products_wait(self.transport.waiting_margin(self.num_sms));
            }
            Ok(vec![(backend, LevelledTransport::new(levels))])
        };
        connect().map_err(|error| world.fail(error))
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(host)?;
        let memory = self.device.memory();
        let memory =
            memory.map_err(|error| exec_error(self.rendezvous.rank(), "the memory of a device", error))?;
        let available = memory.free as u64;
        if ranks > available {
            let rank = Some(self.rendezvous.rank());
            return Err(ExecError::OutOfMemory { rank, needed: ranks, available });
        }
        Ok(())
    }
}

/// Whether this rank reaches the memory of the ranks that are `near`, the reason where not.
fn reach(
    device: &Device,
    rank: usize,
    near: &[usize],
    neighbours: &[usize],
    seats: &[Seat],
) -> Result<(), Unreached> {
    for &peer in near {
        if !neighbours.contains(&peer) {
            return Err(Unreached::OtherHost { rank, peer });
        }
        let Some(handle) = &seats[peer].probe else {
            return Err(Unreached::NotShared { peer });
        };
        // Closed at once.
        OpenedMemory::open(device, handle, PROBE_BYTES).map_err(|error| Unreached::NotOpened {
            rank,
            peer,
            text: error.to_string(),
        })?;
    }
    Ok(())
}

/// What `wanted` is for ranks of which some do not reach the memory that they should, for that reason, and of which
/// `sharing` are on one GPU.
fn choose(
    wanted: TransportKind,
    unreached: Option<Unreached>,
    topology: Topology,
    sharing: usize,
) -> Result<TransportKind, CudaError> {
    let kind = match (wanted, &unreached) {
        (TransportKind::Auto, None) if topology.nodes() > 1 => TransportKind::HIERARCHICAL,
        (TransportKind::Auto, None) => TransportKind::Nvlink,
        (TransportKind::Auto, Some(_)) => TransportKind::NCCL,
        (kind, _) => kind,
    };
    let refuse =
        |fault: TransportFault| Err(CudaError::Transport { transport: kind.name(), reason: fault.into() });
    match (kind, unreached) {
        (TransportKind::Nccl(_), _) if sharing > 1 => refuse(TransportFault::SharedGpu { sharing }),
        (TransportKind::Nccl(_), _) | (_, None) => Ok(kind),
        (_, Some(unreached)) => refuse(TransportFault::Unreached(unreached)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_with_what_does() {
        let (flat, nodes) = (Topology::flat(4), Topology { world_size: 4, ranks_per_node: 2 });
        let far = || Some(Unreached::OtherHost { rank: 0, peer: 2 });
        let chosen =
            |wanted, unreached, topology, sharing| choose(wanted, unreached, topology, sharing).unwrap();
        assert_eq!(chosen(TransportKind::Auto, None, flat, 1), TransportKind::Nvlink);
        assert_eq!(chosen(TransportKind::Auto, None, flat, 2), TransportKind::Nvlink);
        assert_eq!(chosen(TransportKind::Auto, far(), flat, 1), TransportKind::NCCL);
        assert_eq!(chosen(TransportKind::Auto, None, nodes, 2), TransportKind::HIERARCHICAL);
        assert_eq!(chosen(TransportKind::NCCL, far(), nodes, 1), TransportKind::NCCL);
        assert_eq!(chosen(TransportKind::CopyEngine, None, nodes, 2), TransportKind::CopyEngine);
        for (wanted, unreached, sharing, word) in [
            (TransportKind::Nvlink, far(), 1, "use --transport nccl"),
            (TransportKind::CopyEngine, far(), 1, "different hosts"),
            (TransportKind::HIERARCHICAL, far(), 1, "different hosts"),
            (TransportKind::NCCL, None, 2, "2 ranks share a GPU"),
            (TransportKind::Auto, far(), 2, "2 ranks share a GPU"),
        ] {
            let error = choose(wanted, unreached, flat, sharing).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
